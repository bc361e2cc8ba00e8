"""The settings of a process: its device, timeouts and watchdog."""

from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Literal, get_args

DeviceChoice = Literal["auto", "cpu", "cuda", "xpu", "mps", "npu", "hpu", "mlu", "xla"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSettings:
    """The `state` section: the device, the timeouts for other ranks, and the checks and watchdog on them."""

    device: DeviceChoice = field(
        default="auto",
        metadata={
            "help": "Kind of device to compute on; auto takes the accelerator that is here, else the CPU."
        },
    )
    timeout_seconds: float = field(
        default=600.0,
        metadata={"help": "Seconds that a collective or the first meeting may take before it fails."},
    )
    watchdog: bool = field(
        default=True,
        metadata={"help": "Watch for hangs in a thread of each rank, and name the culprit of one."},
    )
    hang_timeout_seconds: float = field(
        default=60.0,
        metadata={"help": "Seconds without progress after which the watchdog asks every rank where it is."},
    )
    hang_report_directory: Path | None = field(
        default=None,
        metadata={
            "help": "Folder for all ranks' stacks at a hang; by default the one the run was started in."
        },
    )
    debug: bool = field(
        default=False,
        metadata={"help": "Compare what ranks hand to each collective first: an error, not a hang; slower."},
    )
    deterministic: bool = field(
        default=False,
        metadata={"help": "Use deterministic kernels only; an operation that has none raises."},
    )

    def __post_init__(self) -> None:
        if self.device not in get_args(DeviceChoice):
            allowed = ", ".join(get_args(DeviceChoice))
            raise ValueError(f"device={self.device!r}: say one of {allowed}")
        for name in ("timeout_seconds", "hang_timeout_seconds"):
            value = getattr(self, name)
            if not (isfinite(value) and value > 0):
                raise ValueError(f"{name}={value!r}: a finite number of seconds above 0 is allowed")
