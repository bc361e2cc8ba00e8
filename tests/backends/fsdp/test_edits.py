"""Edits of shards while they are no step's yet."""

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from backends.replicas import prepare_sgd, step_and_clear
from drivetrain_backends import AccumulationError
from sharded_stack import fsdp, loss_of, stack, weights

Edit = Callable[[nn.Module], object]


def zero_grad(model: nn.Module) -> None:
    model.zero_grad()


def clip(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def halve(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)


def trained(
    edit: Edit | None = None, *, count: int | None = None, first: bool = True, norm: float | None = None
) -> dict[str, Tensor] | str:
    """Train for a window of two, with an edit before or after each backward; the weights, or the error."""
    backend, _model, prepared = prepare_sgd(fsdp(accumulation=2), stack())
    try:
        for number in range(2):
            backend.window.begin()
            with nullcontext() if backend.window.closing else prepared.no_sync():
                if edit is not None and first:
                    edit(prepared.model)
                prepared.backward(loss_of(prepared.model, dist.get_rank() + number), count=count)
                if edit is not None and not first:
                    edit(prepared.model)
            if norm is not None:
                prepared.clip(norm=norm)
            step_and_clear(prepared)
        return weights(prepared)
    except AccumulationError as error:
        assert prepared.optimizers[0].num_steps == 0
        return str(error)
    finally:
        backend.close()


def trained_with_edits() -> dict[str, dict[str, Tensor] | str]:
    found = {"our clip": trained(norm=1e-3)}
    for count in (None, 4):
        found[f"plain {count}"] = trained(count=count)
        found[f"zero_grad before {count}"] = trained(zero_grad, count=count)
        found[f"clip after {count}"] = trained(clip, count=count, first=False)
        found[f"clip before {count}"] = trained(clip, count=count)
        found[f"zero_grad after {count}"] = trained(zero_grad, count=count, first=False)
        found[f"halve after {count}"] = trained(halve, count=count, first=False)
    return found


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.allclose(value, other[name]) for name, value in one.items())


@pytest.mark.slow
def test_edits_of_shards_in_a_window_are_refused_or_change_what_the_step_takes(run_ranks) -> None:
    """What a window gathers is not in `.grad` before its last backward: nothing is there to clear or clip."""
    untrained = dict(stack().state_dict())
    for found in run_ranks(trained_with_edits):
        assert same(found["clip after None"], found["our clip"])  # the mean's gradients are what a step takes
        assert "(shards of all) were changed since their last loss" in found["clip after 4"]
        for count in (None, 4):
            plain = found[f"plain {count}"]
            assert not same(plain, untrained)
            assert same(found[f"zero_grad before {count}"], plain)
            assert same(found[f"clip before {count}"], plain)
            assert same(found[f"zero_grad after {count}"], untrained)
            assert "were changed since their last loss" in found[f"halve after {count}"]
