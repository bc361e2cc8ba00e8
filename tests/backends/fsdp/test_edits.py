"""Edits of shards while they are no step's yet."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from drivetrain_backends import AccumulationError
from plain_loop.backends import fsdp, held, prepare_sgd, step_and_clear, weights
from plain_loop.stack import loss_of, stack

Edit = Callable[[nn.Module], object]


def nothing(model: nn.Module) -> None:
    del model


def clip(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def halve(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)


def trained(
    before: Edit = nothing, after: Edit = nothing, *, count: int | None = None, norm: float | None = None
) -> dict[str, Tensor]:
    """Train for a window of two, with edits before and after each backward; return the weights."""
    backend, _, prepared = prepare_sgd(fsdp(accumulation=2), stack())
    try:
        for number in range(2):
            backend.window.begin()
            with held(backend, [prepared]):
                before(prepared.model)
                prepared.backward(loss_of(prepared.model, dist.get_rank() + number), count=count)
                after(prepared.model)
            if norm is not None:
                prepared.clip(norm=norm)
            step_and_clear(prepared)
        return weights(prepared)
    except AccumulationError:
        assert prepared.optimizers[0].num_steps == 0
        raise
    finally:
        backend.close()


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.allclose(value, other[name]) for name, value in one.items())


@pytest.mark.slow
@pytest.mark.ranks(2)
@pytest.mark.parametrize("count", [None, 4])
def test_edits_of_shards_in_a_window_are_refused_or_change_what_the_step_takes(count: int | None) -> None:
    """What a window gathers is not in `.grad` before its last backward: nothing is there to clear or clip."""
    untrained, plain = dict(stack().state_dict()), trained(count=count)
    assert not same(plain, untrained)
    for before in (nn.Module.zero_grad, clip):
        assert same(trained(before, count=count), plain)
    assert same(trained(after=nn.Module.zero_grad, count=count), untrained)
    with pytest.raises(AccumulationError, match="were changed since their last loss"):
        trained(after=halve, count=count)
    if count is None:
        assert same(trained(after=clip), trained(norm=1e-3))  # a step takes the mean's gradients as they are
    else:
        with pytest.raises(AccumulationError, match=r"\(shards of all\) were changed since their last loss"):
            trained(after=clip, count=count)
