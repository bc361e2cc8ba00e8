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
            "help": "Kind of device to compute on; auto selects the accelerator of this machine, or the CPU "
            "without one."
        },
    )
    timeout_seconds: float = field(
        default=600.0,
        metadata={
            "help": "Maximum seconds of a collective, and of the first connection of the ranks, before it "
            "fails."
        },
    )
    watchdog: bool = field(
        default=True,
        metadata={
            "help": "Whether a thread of each rank watches for hangs and reports the rank that caused one."
        },
    )
    hang_timeout_seconds: float = field(
        default=60.0,
        metadata={
            "needs": "watchdog",
            "help": "Seconds without progress after which the watchdog asks every rank for its position.",
        },
    )
    hang_report_directory: Path | None = field(
        default=None,
        metadata={
            "needs": "watchdog",
            "help": "Folder for the stacks of all ranks at a hang; unset: the working directory.",
        },
    )
    debug: bool = field(
        default=False,
        metadata={
            "help": "Whether ranks compare the arguments of each collective first, to raise an error instead "
            "of hanging; slower."
        },
    )
    deterministic: bool = field(
        default=False,
        metadata={
            "help": "Whether to use deterministic kernels only; an operation without one raises an error."
        },
    )

    def __post_init__(self) -> None:
        if self.device not in get_args(DeviceChoice):
            allowed = ", ".join(get_args(DeviceChoice))
            raise ValueError(f"device={self.device!r}: say one of {allowed}")
        for name in ("timeout_seconds", "hang_timeout_seconds"):
            value = getattr(self, name)
            if not (isfinite(value) and value > 0):
                raise ValueError(f"{name}={value!r}: a finite number of seconds above 0 is allowed")
