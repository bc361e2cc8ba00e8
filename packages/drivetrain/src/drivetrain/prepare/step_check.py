"""The measured memory and time of a run's first steps, beside what the plan has predicted."""

import logging
import time

import torch

from drivetrain.parts.parts import Parts
from drivetrain.plan.effective import plan_of, store_plan
from drivetrain_memory.peaks.device_peak import begin_device_peaks, read_device_peaks
from drivetrain_messages import format_size
from drivetrain_plan import TrainingPlan

logger = logging.getLogger(__name__)
_STEPS = 5  # that are measured, after one in which optimizers create their states
_TOLERANCE = 0.15


class StepCheck:
    """The comparison of a run's first steps with their prediction, once.

    Args:
        parts: The parts of the Accelerator.
        plan: The plan that was chosen.
        not_modelled: The part of a step that the prediction leaves out, in words.
    """

    def __init__(self, parts: Parts, plan: TrainingPlan, *, not_modelled: str) -> None:
        self._parts: Parts | None = parts
        self._plan, self._not_modelled = plan, not_modelled
        # The optimizers' count when this last looked, and the steps counted here: a loaded run begins above 0.
        self._last: int | None = None
        self._step = 0
        self._begun = 0.0
        self._peaks = ()

    def end_step(self) -> None:
        """Count a step; after the last that is measured, tell what was found. Called on all ranks."""
        if (parts := self._parts) is None or parts.backend.window.is_probe:
            return
        total = max((one.num_steps for one in parts.prepared.optimizers), default=0)
        before, self._last = self._last, total
        if total == (before or 0):  # a skipped step, or another optimizer of the same one
            return
        self._step = step = self._step + 1
        device = parts.context.device
        if step not in (1, 1 + _STEPS):
            return
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        if step == 1:
            self._begun, self._peaks = time.perf_counter(), begin_device_peaks()
            return
        self._parts = None  # told once
        seconds = (time.perf_counter() - self._begun) / _STEPS
        found = {"time": (seconds, self._plan.time.seconds, "s")}
        peaks = [one.peak_bytes for one in read_device_peaks(self._peaks)]
        if peaks:
            found["memory"] = (float(max(peaks)), self._plan.memory.peak, "bytes")
        if parts.context.topology.is_main:
            self._tell(parts, found)

    def _tell(self, parts: Parts, found: dict[str, tuple[float, float, str]]) -> None:
        said, off = list[str](), list[str]()
        for name, (measured, predicted, unit) in found.items():
            change = measured / predicted - 1
            one, other = (
                format_size(int(value)) if unit == "bytes" else f"{value:.3g} s"
                for value in (measured, predicted)
            )
            said.append(f"{name} {one}, predicted {other} ({change:+.0%})")
            if abs(change) > _TOLERANCE:
                off.append(said[-1])
        if "memory" not in found:
            said.append("memory is not counted by the allocator of the CPU")
        parts.facts["measured"] = f"{'; '.join(said)}; steps 2 to {1 + _STEPS}"
        store_plan(plan_of(parts), parts.settings)
        if off:
            logger.warning(
                "the plan %s was off by more than %.0f %%: %s. Not modelled: %s",
                self._plan.choice.name, 100 * _TOLERANCE, "; ".join(off), self._not_modelled,
            )  # fmt: skip
