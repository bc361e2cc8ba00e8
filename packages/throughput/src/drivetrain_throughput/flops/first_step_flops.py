"""Give a meter the inputs of MFU: the peak of the devices, and the operations of the first step."""

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from drivetrain_state import Context
from drivetrain_throughput.device_peaks import peak_flops
from drivetrain_throughput.meter import ThroughputMeter
from drivetrain_tracking import TrackingSettings

if TYPE_CHECKING:
    from drivetrain_throughput.flops.step_flops import StepFlops

logger = logging.getLogger(__name__)


class FirstStepFlops:
    """The count of the first step's operations, if the device's peak is known and the operations are not given."""

    def __init__(
        self,
        meter: ThroughputMeter,
        *,
        context: Context,
        settings: TrackingSettings,
        mode: str,
        models: Callable[[], Sequence[nn.Module]],
    ) -> None:
        self._meter, self._context, self._settings = meter, context, settings
        self._mode, self._models = mode, models
        self._counter: StepFlops | None = None
        self._is_over = False

    def mark(self, phase: str, *, begins: bool) -> None:
        """Note the begin or end of a phase; the first forward or backward begins the count."""
        if self._is_over or phase not in ("forward", "backward"):
            return
        # A forward without gradients belongs to an evaluation, not to the step.
        if phase == "forward" and not torch.is_grad_enabled():
            return
        if self._counter is None:
            if not begins:
                return
            topology, peak = self._context.topology, self._settings.peak_flops
            if peak is None:  # now, since without a mode of the run it depends on the prepared models
                peak = _find_model_peak(
                    self._context.device, self._mode, self._models(), is_main=topology.is_main
                )
            self._meter.peak_flops = None if peak is None else peak * topology.world_size
            if self._meter.peak_flops is None or self._meter.flops_per_step is not None:
                self._is_over = True
                return
            # torch's counter imports Triton, which a run that counts nothing has no use for.
            from drivetrain_throughput.flops.step_flops import StepFlops

            self._counter = StepFlops()
        if begins:
            self._counter.begin(is_backward=phase == "backward")
        else:
            self._counter.end()

    def end_step(self) -> None:
        """End the count, and give the result to the meter."""
        if self._counter is not None:
            # What ranks that compute a sample together do not divide, each of them has counted.
            num_copies = self._context.ranks("replica").size / self._counter.num_parts
            self._meter.flops_per_step = self._counter.total * self._context.topology.world_size / num_copies
            self._counter, self._is_over = None, True


def _find_model_peak(
    device: torch.device, mode: str, models: Sequence[nn.Module], *, is_main: bool
) -> float | None:
    """Return the peak of a device in FLOP/s in the precision that the models compute in, or None if it is unknown."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    precision = mode if mode in ("bf16", "fp16") else None
    if precision is None:
        dtypes = [parameter.dtype for model in models for parameter in model.parameters()]
        if dtypes and all(dtype in (torch.bfloat16, torch.float16) for dtype in dtypes):
            precision = "bf16" if dtypes[0] == torch.bfloat16 else "fp16"
        else:
            precision = "fp32" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    found = peak_flops(name, precision)
    if found is None and is_main:
        logger.log(
            logging.INFO if device.type == "cpu" else logging.WARNING,
            "throughput/mfu is left out: the peak of %s in %s is in no table; give it as tracking.peak_flops, in "
            "FLOP/s of one device",
            name,
            precision,
        )
    return found
