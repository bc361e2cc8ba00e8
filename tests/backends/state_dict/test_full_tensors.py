from collections.abc import Iterator, Mapping

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from drivetrain_backends import iter_full_tensors, load_full_state_dict
from drivetrain_state import StateSettings, connect
from plain_loop.backends import fsdp, single
from plain_loop.stack import stack


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


@pytest.mark.ranks(2)
def test_what_rank_0_reads_is_handed_out_and_comes_back_whole_on_rank_0_alone() -> None:
    backend, is_first = fsdp(), dist.get_rank() == 0
    with backend.building():
        model = stack()
    (prepared,) = backend.prepare([model], [], [])
    mapping, expected = Lazily(seed=5), stack(5).state_dict()
    load_full_state_dict(prepared, mapping if is_first else None, backend.context)
    found = dict(iter_full_tensors(prepared, backend.context))
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert torch.equal(found[name], value) if is_first else found[name] is None
    assert mapping.num_read == (len(expected) if is_first else 0)


@pytest.mark.ranks(2)
def test_tensors_that_are_not_the_models_are_refused_on_every_rank() -> None:
    backend, tensors = fsdp(), dict(stack().state_dict())
    (prepared,) = backend.prepare([stack()], [], [])
    for changed, said in (
        ({**tensors, "head.weight": torch.zeros(1, 1)}, r"head\.weight is of shape \(1, 1\), not \(5, 6\)"),
        (
            {name.replace("head", "tail"): value for name, value in tensors.items()},
            r"missing \['head\.weight'\], unexpected \['tail\.weight'\]",
        ),
    ):
        with pytest.raises(ValueError, match=said):
            load_full_state_dict(prepared, changed if dist.get_rank() == 0 else None, backend.context)


def test_a_model_of_an_accelerator_is_refused_with_what_to_call() -> None:
    where = connect(StateSettings(device="cpu"))
    with pytest.raises(TypeError, match=r"iter_full_tensors\(Stack\).*get_state_dict\(model\)"):
        dict(iter_full_tensors(stack(), where))
    with pytest.raises(TypeError, match=r"load_full_state_dict\(Stack\).*gathered\(model, write=True\)"):
        load_full_state_dict(stack(), {}, where)


@pytest.mark.ranks(1)
def test_a_model_of_another_backend_is_read_and_loaded_the_same_way() -> None:
    backend = single()
    (prepared,) = backend.prepare([stack(seed=0)], [], [])
    load_full_state_dict(prepared, stack(seed=5).state_dict(), backend.context)
    for name, value in iter_full_tensors(prepared, backend.context):
        assert torch.equal(value, stack(seed=5).state_dict()[name])
