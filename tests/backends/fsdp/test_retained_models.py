"""A model that was sharded goes on training after `close`, as one that nobody closed."""

import gc
from collections.abc import Callable
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Adam

from backends.replicas import plain_step, step_and_clear
from drivetrain_backends import FSDPBackend, Prepared, UnshardedParameterError
from sharded_stack import fsdp, loss_of, stack, tokens, train_window, weights

Again = Callable[[FSDPBackend, Prepared], Prepared]


def steps(backend: FSDPBackend, prepared: Prepared, number: int = 2) -> list[float]:
    """Train for some windows of two micro-batches, whose first is held back: the losses."""
    windows = (train_window(backend, prepared, 2 * step + dist.get_rank()) for step in range(number))
    return [loss for window in windows for loss in window]


def as_it_is(_: FSDPBackend, prepared: Prepared) -> Prepared:
    return prepared


def closed(backend: FSDPBackend, prepared: Prepared) -> Prepared:
    optimizer = prepared.optimizers[0].optimizer
    backend.close()
    (again,) = backend.prepare([prepared.unwrap()], [optimizer], [])
    return again


def closed_in_a_window(backend: FSDPBackend, prepared: Prepared) -> Prepared:
    backend.window.begin()
    with prepared.no_sync():
        prepared.backward(loss_of(prepared.model, 7))
    return closed(backend, prepared)


def evaluated_in_between(backend: FSDPBackend, prepared: Prepared) -> Prepared:
    optimizer, model = prepared.optimizers[0].optimizer, prepared.unwrap()
    backend.close()
    with torch.no_grad():
        assert model(tokens(0)).isfinite().all()
    (again,) = backend.prepare([model], [optimizer], [])
    return again


def trained(again: Again, mode: str, options: dict[str, object]) -> tuple[list[float], dict[str, Tensor]]:
    backend = fsdp(mode, accumulation=2, **options)
    model = stack(0, tied=True)
    model.embedding.weight.register_hook(lambda gradient: gradient * 0.5)
    (prepared,) = backend.prepare([model], [Adam(model.parameters(), lr=0.05)], [])
    losses = steps(backend, prepared)
    prepared = again(backend, prepared)
    losses += steps(backend, prepared)
    found = weights(prepared)
    backend.close()
    return losses, found


def both(again: Again, mode: str, options: dict[str, object]) -> list[tuple[list[float], dict[str, Tensor]]]:
    return [trained(each, mode, options) for each in (as_it_is, again)]


@pytest.mark.parametrize("again", [closed, closed_in_a_window, evaluated_in_between])
@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("no", {}),
        pytest.param("bf16", {"activation_checkpointing": "full"}, marks=pytest.mark.slow),
        pytest.param("no", {"strategy": "shard_grad_op", "prefetch": 1}, marks=pytest.mark.slow),
        pytest.param("no", {"offload": True}, marks=pytest.mark.slow),
        pytest.param("fp16", {"wrap": ("Stack",)}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.default_cases("no-options0-evaluated_in_between")
def test_it_trains_as_if_it_had_not_been_closed(run_ranks, again, mode: str, options: dict) -> None:
    for whole, resumed in run_ranks(both, again, mode, options):
        assert resumed[0] == whole[0]
        torch.testing.assert_close(resumed[1], whole[1], rtol=0, atol=0)


def unfrozen() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Train the head alone, then all: under FSDP, and the weights of a plain loop."""
    backend = fsdp()
    sharded, plain = stack(0), stack(0)
    for stage in range(2):
        for model in (sharded, plain):
            for parameter in model.parameters():
                parameter.requires_grad_(stage == 1 or any(parameter is p for p in model.head.parameters()))
        optimizers = [Adam([p for p in m.parameters() if p.requires_grad], lr=0.05) for m in (sharded, plain)]
        (prepared,) = backend.prepare([sharded], optimizers[:1], [])
        for step in range(2):
            backend.window.begin()
            prepared.backward(loss_of(prepared.model, step))
            step_and_clear(prepared)
            plain_step(optimizers[1], loss_of(plain, step))
        found = weights(prepared)
        backend.close()
    return found, {name: value.detach() for name, value in plain.state_dict().items()}


def test_a_second_stage_trains_what_the_first_had_frozen(run_ranks) -> None:
    for found, plain in run_ranks(unfrozen):
        torch.testing.assert_close(found, plain)


def changed(kind: str) -> str:
    backend = fsdp()
    model = stack(0)
    backend.prepare([model], [], [])
    backend.close()
    if kind == "added":
        model.extra = nn.Linear(2, 2)
    else:
        model.head = nn.Linear(6, 5, bias=False)
    model(tokens(0)).sum()  # leaves the blocks gathered, as no backward follows
    try:
        backend.prepare([model], [], [])
    except UnshardedParameterError as error:
        return str(error)
    return "prepared"


@pytest.mark.parametrize(
    ("kind", "said"),
    [("added", "extra.weight was created after"), ("replaced", "head.weight was created after")],
)
def test_a_model_that_was_changed_in_between_is_refused(run_ranks, kind: str, said: str) -> None:
    for message in run_ranks(changed, kind):
        assert said in message


def memory_after() -> tuple[bool, str]:
    backend = fsdp()
    model = stack(0)
    backend.prepare([model], [], [])
    backend.close()
    try:
        fsdp().prepare([model], [], [])
        said = "prepared"
    except ValueError as error:
        said = str(error)
    watched: ref[nn.Module] = ref(model)
    del model
    gc.collect()
    kept = watched() is not None
    backend.close()
    return kept, said


def test_a_closed_model_is_not_kept_and_no_other_backend_takes_it(run_ranks) -> None:
    for kept, said in run_ranks(memory_after):
        assert not kept
        assert "Stack is prepared already: it is sharded" in said
