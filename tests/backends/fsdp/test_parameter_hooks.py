"""Hooks on parameters do under FSDP what they do in a plain loop."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD

from backends.replicas import plain_step
from drivetrain_backends import UnshardedParameterError
from sharded_stack import Stack, fsdp, loss_of, stack, train_window, weights


def mask(tensor: Tensor) -> Tensor:
    rows = torch.ones_like(tensor)
    rows[1:3] = 0
    return tensor * rows


def keep_rows(parameter: Tensor) -> None:
    parameter.grad[1:3] = 0  # as a mask on rows is written: by index


def hook(model: nn.Module, kind: str) -> list[object]:
    """Set hooks on the embedding and on a block: the handles."""
    chosen = [model.embedding.weight, model.blocks[0].linear.weight]
    if kind == "gradient":
        return [p.register_hook(mask) for p in chosen]
    return [p.register_post_accumulate_grad_hook(keep_rows) for p in chosen]


def train(kind: str, when: str, **options: object) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights after two windows, and after one more with the hooks taken off."""
    backend = fsdp(accumulation=2, **options)
    model = stack(0)
    handles = hook(model, kind) if when == "before" else []
    (prepared,) = backend.prepare([model], [SGD(model.parameters(), lr=0.5)], [])
    found: list[dict[str, Tensor]] = []
    if when == "after":
        handles = hook(model, kind)
    for step in range(3):
        if step == 2:
            found.append(weights(prepared))
            for handle in handles:
                handle.remove()
        train_window(backend, prepared, 2 * dist.get_rank())
    found.append(weights(prepared))
    backend.close()
    return found[0], found[1]


def train_plainly() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model: Stack = stack(0)
    optimizer = SGD(model.parameters(), lr=0.5)
    found: list[dict[str, Tensor]] = []
    handles = hook(model, "gradient")
    for step in range(3):
        if step == 2:
            found.append({name: value.clone() for name, value in model.state_dict().items()})
            for handle in handles:
                handle.remove()
        plain_step(optimizer, torch.stack([loss_of(model, index) for index in range(4)]).mean())
    return found[0], dict(model.state_dict())


def train_each(cases: list[tuple[str, str, dict[str, object]]]) -> list[object]:
    return [train(kind, when, **options) for kind, when, options in cases]


CASES: list[tuple[str, str, dict[str, object]]] = [
    *((kind, when, {}) for kind in ("gradient", "parameter") for when in ("before", "after")),
    ("gradient", "before", {"strategy": "no_shard"}),
    ("parameter", "after", {"strategy": "shard_grad_op", "activation_checkpointing": "full"}),
]


def test_hooks_on_parameters_act_as_in_a_plain_loop(run_ranks) -> None:
    expected = train_plainly()
    for by_case in run_ranks(train_each, CASES):
        for found in by_case:
            for want, have in zip(expected, found, strict=True):
                torch.testing.assert_close(have, dict(want))


def refused() -> list[str]:
    said: list[str] = []

    def note(call: Callable[[], object]) -> None:
        try:
            call()
        except UnshardedParameterError as error:
            said.append(str(error))

    backend = fsdp()
    model = stack(0)
    listed = list(model.parameters())
    hook(model, "gradient")
    (prepared,) = backend.prepare([model], [SGD(model.parameters(), lr=0.5)], [])
    note(lambda: listed[0].register_hook(mask))
    note(lambda: listed[1].register_post_accumulate_grad_hook(keep_rows))
    backend.window.begin()
    loss_of(prepared.model, 0).backward()
    note(prepared.optimizers[0].step)
    backend.close()
    return said


@pytest.mark.filterwarnings("error")
def test_hooks_that_nothing_would_run_are_refused(run_ranks) -> None:
    for husk, other, plain in run_ranks(refused):
        assert "a hook on embedding.weight as it was before prepare()" in husk
        assert "take the parameter anew from model.named_parameters()" in other
        assert "has a hook that loss.backward() does not run" in plain
