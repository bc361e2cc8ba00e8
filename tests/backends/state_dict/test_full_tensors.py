from collections.abc import Iterator, Mapping

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from drivetrain_backends import AccumulationWindow, SingleBackend, iter_full_tensors, load_full_state_dict
from drivetrain_precision import choose_policy
from drivetrain_state import StateSettings, connect
from sharded_stack import context, fsdp, stack


class Lazily(Mapping[str, Tensor]):
    """Tensors that are made when they are read, as a file's are; it counts how many were."""

    def __init__(self, seed: int) -> None:
        self.tensors = stack(seed).state_dict()
        self.num_read = 0

    def __getitem__(self, name: str) -> Tensor:
        self.num_read += 1
        return self.tensors[name].clone()

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


def load_on_rank_0() -> tuple[dict[str, Tensor | None], int]:
    backend = fsdp()
    with backend.building():
        model = stack()
    (prepared,) = backend.prepare([model], [], [])
    mapping = Lazily(seed=5)
    load_full_state_dict(prepared, mapping if dist.get_rank() == 0 else None, backend.context)
    found = dict(iter_full_tensors(prepared, backend.context))
    backend.close()
    return found, mapping.num_read


def test_what_rank_0_reads_is_handed_out_and_comes_back_whole_on_rank_0_alone(run_ranks) -> None:
    expected = stack(5).state_dict()
    (first, num_read), (second, num_read_elsewhere) = run_ranks(load_on_rank_0)
    assert list(first) == list(second) == list(expected)
    assert all(torch.equal(first[name], value) for name, value in expected.items())
    assert all(value is None for value in second.values())
    assert (num_read, num_read_elsewhere) == (len(expected), 0)


def load_what_does_not_fit(kind: str) -> str:
    backend = fsdp()
    (prepared,) = backend.prepare([stack()], [], [])
    tensors = dict(stack().state_dict())
    if kind == "shape":
        tensors["head.weight"] = torch.zeros(1, 1)
    else:
        tensors["tail.weight"] = tensors.pop("head.weight")
    try:
        load_full_state_dict(prepared, tensors if dist.get_rank() == 0 else None, backend.context)
    except ValueError as error:
        return str(error)
    return "loaded"


def test_tensors_that_are_not_the_models_are_refused_on_every_rank(run_ranks) -> None:
    for said in run_ranks(load_what_does_not_fit, "name"):
        assert "missing ['head.weight'], unexpected ['tail.weight']" in said
    for said in run_ranks(load_what_does_not_fit, "shape"):
        assert said.startswith("head.weight is of shape (1, 1), not (5, 6)")


def test_a_model_of_an_accelerator_is_refused_with_what_to_call() -> None:
    where = connect(StateSettings(device="cpu"))
    with pytest.raises(TypeError, match=r"iter_full_tensors\(Stack\).*get_state_dict\(model\)"):
        dict(iter_full_tensors(stack(), where))
    with pytest.raises(TypeError, match=r"load_full_state_dict\(Stack\).*gathered\(model, write=True\)"):
        load_full_state_dict(stack(), {}, where)


def load_into_one_device() -> bool:
    where = context()
    backend = SingleBackend(where, choose_policy("no", where.device), window=AccumulationWindow())
    (prepared,) = backend.prepare([stack(seed=0)], [], [])
    load_full_state_dict(prepared, stack(seed=5).state_dict(), where)
    expected = stack(seed=5).state_dict()
    return all(torch.equal(value, expected[name]) for name, value in iter_full_tensors(prepared, where))


def test_a_model_of_another_backend_is_read_and_loaded_the_same_way(run_ranks) -> None:
    assert run_ranks(load_into_one_device, num_processes=1) == [True]
