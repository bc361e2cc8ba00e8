"""Steps whose gradients are not finite, and losses that are scaled."""

import pytest
import torch
from torch.optim import SGD

from deepspeed_backend.engines import Weights, backend, weights
from drivetrain_backends import NonFiniteGradientError
from drivetrain_precision import SkippedStepsError

X = torch.tensor([1.0, 2.0, 3.0])


def scaled(stage: int) -> list[list[float]]:
    """Weights after steps of gradient X, and of one that overflows, with a loss scale of 1024."""
    found: list[list[float]] = []
    with backend(stage=stage, scale=1024.0) as one:
        model = Weights()
        (prepared,) = one.prepare([model], [SGD([model.w], lr=1.0)], [])
        for factor in (1.0, float("inf"), 1.0):
            one.window.begin()
            prepared.backward(prepared.model(X) * factor * 2, count=2)
            norm = prepared.clip(norm=1000.0)
            prepared.optimizers[0].step()
            assert norm is not None
            found.append([*weights(prepared), norm.item(), float(prepared.optimizers[0].was_skipped)])
        found.append([one.state_dict()["scaler"]["scale"]])
    return found


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_losses_are_scaled_and_an_overflow_is_skipped(run_ranks, stage: int) -> None:
    ((first, skipped, third, scale),) = run_ranks(scaled, stage, num_processes=1)
    assert first == pytest.approx([0.0, -1.0, -2.0, 14**0.5, 0.0])
    assert skipped[:3] == first[:3]
    assert skipped[4] == 1.0
    assert third[:3] == pytest.approx([-1.0, -3.0, -5.0])
    assert scale == [512.0]


def never_finite(stage: int) -> tuple[int, str]:
    """The steps before the error of a run whose loss overflows at every scale, and that error."""
    num_skipped = 0
    with backend(stage=stage, scale=4.0) as one:
        model = Weights()
        (prepared,) = one.prepare([model], [SGD([model.w], lr=1.0)], [])
        try:
            for _ in range(9):
                one.window.begin()
                prepared.backward(prepared.model(X * torch.inf))
                prepared.optimizers[0].step()
                num_skipped += prepared.optimizers[0].was_skipped
                prepared.optimizers[0].zero_grad()
        except SkippedStepsError as error:
            return num_skipped, str(error)
    return num_skipped, ""


@pytest.mark.parametrize("stage", [1, 3])
def test_a_run_that_overflows_at_the_smallest_scale_ends_with_the_layers_name(run_ranks, stage: int) -> None:
    for num_skipped, said in run_ranks(never_finite, stage, num_processes=2):
        assert num_skipped == 2
        assert "precision.min_scale=1.0. The first value that is not finite is the input of the model" in said
        assert "on ranks 0, 1" in said


def guarded(stage: int, nonfinite: str, mode: str) -> list[object]:
    """A good step, one whose loss is NaN on rank 1, a good step."""
    with backend(stage=stage, nonfinite=nonfinite, mode=mode) as one:
        model = Weights()
        (prepared,) = one.prepare([model], [SGD([model.w], lr=1.0)], [])
        found: list[object] = []
        for factor in (1.0, float("nan") if one.context.topology.rank == 1 else 1.0, 1.0):
            one.window.begin()
            prepared.backward(prepared.model(X) * factor)
            try:
                prepared.optimizers[0].step()
            except NonFiniteGradientError as error:
                return [*found, str(error)]
            found.append(prepared.optimizers[0].was_skipped)
            prepared.optimizers[0].zero_grad()
        return [*found, weights(prepared) if stage else model.w.tolist()]


WAYS = [(0, "no"), (1, "no"), (2, "no"), (3, "no"), (1, "bf16"), (2, "bf16")]


@pytest.mark.parametrize(("stage", "mode"), WAYS)
def test_a_step_that_is_not_finite_is_skipped_on_all_ranks(run_ranks, stage: int, mode: str) -> None:
    for first, second, third, found in run_ranks(guarded, stage, "skip", mode, num_processes=2):
        assert (first, second, third) == (False, True, False)
        assert found == pytest.approx([-1.0, -3.0, -5.0])


@pytest.mark.parametrize(("stage", "mode"), WAYS)
def test_a_step_that_is_not_finite_ends_the_run_with_the_parameters_name(
    run_ranks, stage: int, mode: str
) -> None:
    for first, said in run_ranks(guarded, stage, "raise", mode, num_processes=2):
        assert first is False
        assert "the gradient of w holds an infinity or NaN at optimizer step 2; a loss of rank 1" in str(said)
