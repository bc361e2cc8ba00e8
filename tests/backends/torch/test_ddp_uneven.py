"""Ranks that run out of batches: gradients are the mean over those that have some, in every precision."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD

from backends.replicas import ddp_backend, prepare_sgd, step_and_clear
from drivetrain_precision import PrecisionSettings

NUM_WINDOWS = (2, 5)  # of each rank


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 2)


def loss_of(model: nn.Module, rank: int, step: int, micro_batch: int) -> torch.Tensor:
    x = torch.linspace(-1, 1, 8).reshape(2, 4) * (1 + rank) + 0.1 * step + 0.05 * micro_batch
    return model(x).float().square().mean()


def plain_weights(accumulation: int) -> torch.Tensor:
    model = linear()
    optimizer = SGD(model.parameters(), lr=0.1)
    for step in range(max(NUM_WINDOWS)):
        ranks = [rank for rank, length in enumerate(NUM_WINDOWS) if length > step]
        losses = [loss_of(model, rank, step, i) for rank in ranks for i in range(accumulation)]
        optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        optimizer.step()
    return model.weight.detach()


def trained_on_uneven_ranks(
    mode: str, accumulation: int, settings: dict[str, object]
) -> tuple[torch.Tensor, int]:
    precision = PrecisionSettings(initial_scale=256.0)
    ddp, model, prepared = prepare_sgd(
        ddp_backend(
            mode, accumulation=accumulation, nonfinite_gradients="raise", precision=precision, **settings
        ),
        linear(),
    )
    with ddp.join([prepared.model]):
        for step in range(NUM_WINDOWS[dist.get_rank()]):
            for i in range(accumulation):
                ddp.window.begin()
                with nullcontext() if ddp.window.closing else prepared.no_sync():
                    prepared.backward(loss_of(prepared.model, dist.get_rank(), step, i))
                step_and_clear(prepared)
    ddp.close()
    return model.weight.detach().clone(), prepared.optimizers[0].num_steps


@pytest.mark.parametrize("mode", ["no", "fp16", "bf16"])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_gradients_are_the_mean_over_the_ranks_that_have_batches(
    run_ranks, mode: str, accumulation: int
) -> None:
    (first, few), (second, many) = run_ranks(trained_on_uneven_ranks, mode, accumulation, {})
    assert (few, many) == NUM_WINDOWS
    assert torch.equal(first, second)  # the ranks that ended take what the last one has
    tolerance = {"no": 1e-6, "fp16": 5e-3, "bf16": 3e-2}[mode]
    torch.testing.assert_close(first, plain_weights(accumulation), atol=tolerance, rtol=0)


@pytest.mark.parametrize(
    "settings",
    [{"find_unused_parameters": True}, {"gradient_as_bucket_view": False}, {"bucket_size_mb": 0.00001}],
)
def test_other_settings_train_the_same_on_uneven_ranks(run_ranks, settings: dict[str, object]) -> None:
    (first, _), (second, _) = run_ranks(trained_on_uneven_ranks, "no", 3, settings)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, plain_weights(3), atol=1e-6, rtol=0)
