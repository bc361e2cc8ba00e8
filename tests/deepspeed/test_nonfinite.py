"""Steps whose gradients are not finite, and losses that are scaled."""

import pytest
import torch

from deepspeed_engines import X, engine_of, take_step, weights
from drivetrain_backends import NonFiniteGradientError
from drivetrain_backends.gradients.nonfinite import describe_weights
from drivetrain_precision import SkippedStepsError


@pytest.mark.ranks(1)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_losses_are_scaled_and_an_overflow_is_skipped(stage: int) -> None:
    with engine_of(stage=stage, scale=1024.0) as (one, _, prepared):
        after = ([0.0, -1.0, -2.0], [0.0, -1.0, -2.0], [-1.0, -3.0, -5.0])
        for factor, expected in zip((1.0, float("inf"), 1.0), after, strict=True):
            prepared.backward(prepared.model(X) * factor * 2, count=2)
            norm = prepared.clip(norm=1000.0)
            prepared.optimizers[0].step()
            assert prepared.optimizers[0].was_skipped == (factor != 1.0)
            assert factor != 1.0 or norm.item() == pytest.approx(14**0.5)
            assert weights(prepared) == pytest.approx(expected)
        assert one.state_dict()["scaler"]["scale"] == 512.0


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_a_run_that_overflows_at_the_smallest_scale_ends_with_the_layers_name(stage: int) -> None:
    with engine_of(stage=stage, scale=4.0) as (_, _, prepared):
        for _ in range(2):
            take_step(prepared, prepared.model(X * torch.inf))
            assert prepared.optimizers[0].was_skipped
        prepared.backward(prepared.model(X * torch.inf))
        said = (
            r"precision\.min_scale=1\.0\. The first value that is not finite is the input of the.* ranks 0, 1"
        )
        with pytest.raises(SkippedStepsError, match=said):
            prepared.optimizers[0].step()


WAYS = [(0, "no"), (1, "no"), (2, "no"), (3, "no"), (1, "bf16"), (2, "bf16")]


def factors(rank: int) -> tuple[float, float, float]:
    """Of the losses of a good step, of one whose loss is NaN on rank 1, and of a good step."""
    return 1.0, float("nan") if rank == 1 else 1.0, 1.0


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("stage", "mode"), WAYS)
def test_a_step_that_is_not_finite_is_skipped_on_all_ranks(stage: int, mode: str) -> None:
    with engine_of(stage=stage, nonfinite="skip", mode=mode) as (one, _, prepared):
        for number, factor in enumerate(factors(one.context.topology.rank)):
            take_step(prepared, prepared.model(X) * factor)
            assert prepared.optimizers[0].was_skipped == (number == 1)
        assert weights(prepared) == pytest.approx([-1.0, -3.0, -5.0])


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("stage", "mode"), WAYS)
def test_a_step_that_is_not_finite_ends_the_run_with_the_parameters_name(stage: int, mode: str) -> None:
    with engine_of(stage=stage, nonfinite="raise", mode=mode) as (one, _, prepared):
        good, bad, _ = factors(one.context.topology.rank)
        take_step(prepared, prepared.model(X) * good)
        prepared.backward(prepared.model(X) * bad)
        said = "the gradient of w holds an infinity or NaN at optimizer step 2; a loss of rank 1"
        with pytest.raises(NonFiniteGradientError, match=said):
            prepared.optimizers[0].step()


@pytest.mark.ranks(1)
@pytest.mark.parametrize("stage", [1, 3])
def test_weights_that_an_engine_divides_are_not_counted(stage: int) -> None:
    with engine_of(stage=stage) as (_, _, prepared):
        assert describe_weights([prepared.unwrap()]) == (
            None if stage == 3 else "The weights are finite still"
        )
