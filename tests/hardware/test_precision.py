"""Steps in fp16 that really overflow, and optimizers in one kernel or in lists: the result is the plain one's."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from drivetrain import Accelerator
from hardware.devices import OnDevice

NUM_STEPS = 3
RATE = 1 / 1024
LARGE = 64.0  # the gradient of the last rank's samples: at the first scale of 65536 it is no number of fp16's


@dataclass(frozen=True, kw_only=True)
class Overflowing:
    """One way to train through overflows.

    Attributes:
        accumulation: Micro-batches a step.
        clip: The norm to clip to.
        counted: Whether the loss is a sum with a count.
    """

    accumulation: int = 1
    clip: float | None = None
    counted: bool = False


def overflow(case: Overflowing, backend: str) -> int:
    """Train until three steps were taken; how many were skipped before them."""
    accelerator = Accelerator(
        backend=backend,
        mixed_precision="fp16",
        gradient_accumulation_steps=case.accumulation,
        sections={"run": {"show_plan": False}},
    )
    given = nn.Linear(4, 1, bias=False)
    nn.init.ones_(given.weight)
    given_optimizer = SGD(given.parameters(), lr=RATE)
    model, optimizer, scheduler = accelerator.prepare(
        given, given_optimizer, LambdaLR(given_optimizer, lambda step: 0.5**step)
    )
    is_last = accelerator.process_index + 1 == accelerator.num_processes
    x = torch.full((4, 4), LARGE if is_last else 1.0, device=accelerator.device)
    gradient = (LARGE + accelerator.num_processes - 1) / accelerator.num_processes
    move = RATE * (gradient if case.clip is None else case.clip / 2)  # of four equal weights
    expected, scales, num_steps, num_skipped = 1.0, [], 0, 0
    while num_steps < NUM_STEPS:
        of_window = train_window(accelerator, case, model, optimizer, scheduler, x)
        assert len({*of_window}) == 1, of_window
        scales.append(of_window[0])
        if accelerator.optimizer_step_was_skipped:
            num_skipped += 1
            assert num_steps == 0, "a step overflowed after one that did not"
        else:
            expected -= move * 0.5**num_steps
            num_steps += 1
        (weight,) = accelerator.get_state_dict(model, everywhere=True).values()
        torch.testing.assert_close(weight.cpu(), torch.full((1, 4), expected), rtol=1e-6, atol=0)
        if not num_steps:
            assert weight.eq(1).all(), "a skipped step moved a weight"
        assert optimizer.param_groups[0]["lr"] == RATE * 0.5**num_steps
    assert num_skipped > 3
    first = [scales[0] * 0.5**index for index in range(num_skipped + 1)]
    assert scales == [*first, *[first[-1]] * (NUM_STEPS - 1)]
    accelerator.end_training()
    return num_skipped


def train_window(
    accelerator: Accelerator,
    case: Overflowing,
    model: nn.Module,
    optimizer: Optimizer,
    scheduler: LambdaLR,
    x: Tensor,
) -> list[float]:
    """Train a window; what each loss was multiplied by."""
    scales: list[Tensor] = []
    for _ in range(case.accumulation):
        with accelerator.accumulate(model):
            outputs = model(x).float()
            loss = outputs.sum() if case.counted else outputs.mean()
            loss.register_hook(scales.append)
            accelerator.backward(loss, count=len(x) if case.counted else None)
            if case.clip is not None and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), case.clip)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return [scale.item() for scale in scales]


def overflow_in_all_ways(backend: str) -> list[int]:
    """Train in all ways; how many steps were skipped in each."""
    numbers: list[int] = []
    for case in (
        Overflowing(),
        Overflowing(accumulation=2, clip=0.5),
        Overflowing(accumulation=2, counted=True),
        Overflowing(counted=True, clip=0.5),
    ):
        try:
            numbers.append(overflow(case, backend))
        except Exception as error:
            error.add_note(f"in {case}")
            raise
    return numbers


def test_steps_that_overflow_are_skipped_and_halve_the_scale(on_device: OnDevice) -> None:
    on_device(overflow_in_all_ways, "single")


@pytest.mark.parametrize("backend", ["ddp", "fsdp"])
@pytest.mark.default_cases
def test_ranks_skip_together_where_one_overflows(on_device: OnDevice, backend: str) -> None:
    first, second = on_device(overflow_in_all_ways, backend, num_processes=2)
    assert first == second


def weights_after(options: dict[str, bool], mode: str, backend: str, cpu: bool) -> dict[str, Tensor]:
    """Train with AdamW of one implementation; the weights."""
    torch.manual_seed(0)
    accelerator = Accelerator(
        backend=backend,
        mixed_precision=mode,
        cpu=cpu or None,
        sections={"precision": {"initial_scale": 2.0**24}, "run": {"show_plan": False}}
        if mode == "fp16"
        else {"run": {"show_plan": False}},
    )
    given = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    model, optimizer = accelerator.prepare(given, AdamW(given.parameters(), lr=0.01, **options))
    x = torch.randn(8, 6).to(accelerator.device)
    num_skipped = num_steps = 0
    while num_steps < 8:
        accelerator.backward((model(x).float() - 1).square().mean())
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        num_skipped += accelerator.optimizer_step_was_skipped
        num_steps += not accelerator.optimizer_step_was_skipped
    assert (num_skipped > 0) == (mode == "fp16")
    steps = {float(state["step"]) for state in optimizer.state.values()}
    assert steps == {float(num_steps)}, "a skipped step was counted"
    state = accelerator.get_state_dict(model, everywhere=True)
    weights = {name: value.cpu() for name, value in state.items()}
    accelerator.end_training()
    return weights


def compare_implementations(mode: str, backend: str) -> None:
    expected = weights_after({"foreach": False}, "no", backend, cpu=True)
    tolerance = 1e-5 if mode == "no" else 5e-3
    for name in ("fused", "foreach"):
        found = weights_after({name: True}, mode, backend, cpu=False)
        for key, value in expected.items():
            torch.testing.assert_close(
                found[key], value, rtol=tolerance, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}"
            )


@pytest.mark.parametrize("mode", ["no", "fp16"])
@pytest.mark.default_cases
def test_fused_and_foreach_optimizers_step_as_the_plain_one(on_device: OnDevice, mode: str) -> None:
    on_device(compare_implementations, mode, "single")
    for backend in ("ddp", "fsdp"):
        on_device(compare_implementations, mode, backend, num_processes=2)
