"""A run whose steps are skipped one after another: when it ends, and that a run without trouble pays nothing."""

import pytest
import torch
from torch import nn

from drivetrain_precision import LossScaler, PrecisionSettings, SkippedSteps, SkippedStepsError

CPU = torch.device("cpu")


def has_hooks(model: nn.Module) -> bool:
    return any(module._forward_hooks for module in model.modules())


class Loop:
    """A training loop of one's own in fp16, as the README shows it."""

    def __init__(self, **settings: float | None) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        given = PrecisionSettings(**settings)
        self.scaler = LossScaler(CPU, given)
        self.skips = SkippedSteps([self.model], given, scaler=self.scaler)

    def step(self, x: float = 1.0, factor: float = 1.0) -> None:
        with torch.autocast("cpu", dtype=torch.float16):
            output = self.model(torch.full((2, 4), x))
        self.scaler.update()
        self.scaler.scale(output.float().mean() * factor / 10).backward()
        self.scaler.unscale([p.grad for p in self.model.parameters() if p.grad is not None])
        if self.scaler.overflowed():
            self.skips.skipped()
        elif self.skips.is_active:
            self.skips.stepped()
        self.model.zero_grad()


def test_the_scale_stays_at_its_floor() -> None:
    scaler = LossScaler(CPU, PrecisionSettings(initial_scale=6.0, min_scale=2.0))
    scales = []
    for _ in range(4):
        scales.append(scaler.value)
        scaler.unscale([torch.tensor([float("inf")])])
        scaler.update()
    assert scales == [6.0, 3.0, 2.0, 2.0]
    assert not scaler.can_fall()


def test_an_overflow_at_the_smallest_scale_ends_the_run_with_the_layers_name() -> None:
    loop = Loop(initial_scale=8.0, min_scale=2.0)
    with torch.no_grad():
        loop.model[0].weight.fill_(5e4)
    loop.step()
    loop.step()
    assert has_hooks(loop.model)
    with pytest.raises(SkippedStepsError) as caught:
        loop.step()
    error = caught.value
    assert (error.num_skipped, error.scale, error.layer) == (3, 2.0, "0")
    assert str(error) == (
        "the gradients of Sequential were not finite in 3 steps one after another, the last at a loss scale of 2.0, "
        "so that nothing was stepped, and the loss scale is at its smallest, precision.min_scale=2.0. The first "
        "value that is not finite is the output of 0 (Linear, float16), whose inputs were finite. Train in "
        "mixed_precision='bf16', which has the range of fp32; if training went well before, lower the learning rate, "
        "and go on from a checkpoint; else look at the weights and the inputs of that layer"
    )


def test_one_bad_batch_at_the_smallest_scale_is_left_out() -> None:
    loop = Loop(initial_scale=1.0)
    for x in (1.0, float("nan"), 1.0, float("nan"), 1.0):
        loop.step(x)
        assert has_hooks(loop.model) == (x != x)
    assert loop.skips.num_skipped == 0
    loop.step(float("nan"))
    with pytest.raises(SkippedStepsError, match=r"the input of the model .* it comes from the batch"):
        loop.step(float("nan"))


def test_a_run_that_finds_its_scale_goes_on_and_drops_its_hooks() -> None:
    loop = Loop()
    for _ in range(20):
        loop.step(factor=3e4)
    assert 1.0 < loop.scaler.value < 64.0
    assert loop.skips.num_skipped == 0
    assert not has_hooks(loop.model)


def test_single_overflows_attach_no_hooks() -> None:
    loop = Loop()
    for x in (1.0, float("nan"), 1.0, 1.0):
        loop.step(x)
        assert not has_hooks(loop.model)


def test_too_many_steps_skipped_one_after_another_end_the_run_at_any_scale() -> None:
    loop = Loop(max_skipped_steps=3)
    for x in (float("nan"), 1.0, float("nan"), float("nan")):
        loop.step(x)
    with pytest.raises(
        SkippedStepsError, match=r"in 3 steps .* no more are allowed, precision.max_skipped_steps=3"
    ):
        loop.step(float("nan"))


def test_without_a_limit_only_the_floor_ends_a_run() -> None:
    skips = SkippedSteps([nn.Linear(2, 1)], PrecisionSettings(max_skipped_steps=None))
    for _ in range(100):
        skips.skipped()
    assert skips.num_skipped == 100


def test_optimizers_that_share_gradients_skip_one_step_together() -> None:
    skips = SkippedSteps([nn.Linear(2, 1)], PrecisionSettings())
    for _ in range(3):
        skips.skipped("one")
        skips.skipped("other")
    assert skips.num_skipped == 3


def test_a_forward_around_the_hooks_is_told() -> None:
    skips = SkippedSteps([nn.Linear(2, 1)], PrecisionSettings(max_skipped_steps=2))
    skips.skipped()
    with pytest.raises(SkippedStepsError, match="no forward of the model itself ran") as caught:
        skips.skipped()
    assert (caught.value.layer, caught.value.scale) == (None, None)


def test_finite_layers_with_gradients_that_are_not_are_told() -> None:
    model = nn.Linear(2, 1)
    skips = SkippedSteps([model], PrecisionSettings(max_skipped_steps=2))
    skips.skipped()
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(SkippedStepsError, match="ranks' gradients overflow as they are summed"):
        skips.skipped()


def test_a_table_is_logged_every_so_many_steps(caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop(watch_underflow=2)
    loop.skips.watch_always()
    for _ in range(5):
        loop.step(factor=1e-8)
    tables = [record.getMessage() for record in caplog.records]
    assert len(tables) == 2
    assert tables[0].startswith("gradients of the last 2 steps by layer (precision.watch_underflow):\nlayer ")
    assert tables[0] == tables[1]  # counted anew
    loop.skips.close()
    assert not has_hooks(loop.model)
