"""The settings of a process: its device, timeouts and watchdog."""

from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any, Literal, get_args

DeviceChoice = Literal["auto", "cpu", "cuda", "xpu", "mps", "npu", "hpu", "mlu", "tpu", "xla"]


def _make_setting(default: Any, text: str, *, needs: str | None = None) -> Any:
    """Return a field with its help text and with the setting that it `needs` to take effect."""
    return field(default=default, metadata={"help": text} | ({"needs": needs} if needs else {}))


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSettings:
    """The `state` section of the settings: the device, the timeouts for other ranks, checks and the watchdog.

    Example:
        >>> StateSettings(device="cpu", timeout_seconds=60).timeout_seconds
        60
    """

    device: DeviceChoice = _make_setting(  # noqa: RUF009 it returns a field
        "auto",
        "Kind of device to compute on; auto selects the accelerator of this machine, or the CPU without one.",
    )
    timeout_seconds: float = _make_setting(
        600.0, "Maximum seconds of a collective, and of the first connection of the ranks, before it fails."
    )
    watchdog: bool = _make_setting(
        True, "Whether a thread of each rank watches for hangs and reports the rank that caused one."
    )
    hang_timeout_seconds: float = _make_setting(
        60.0,
        "Seconds without progress after which the watchdog asks every rank for its position.",
        needs="watchdog",
    )
    hang_report_directory: Path | None = _make_setting(  # noqa: RUF009 it returns a field
        None, "Folder for the stacks of all ranks at a hang; unset: the working directory.", needs="watchdog"
    )
    debug: bool = _make_setting(
        False,
        "Whether ranks compare the arguments of each collective first, to raise an error instead of "
        "hanging; slower.",
    )
    deterministic: bool = _make_setting(
        False, "Whether to use deterministic kernels only; an operation without one raises an error."
    )

    def __post_init__(self) -> None:
        if self.device not in get_args(DeviceChoice):
            raise ValueError(f"device={self.device!r}: say one of {', '.join(get_args(DeviceChoice))}")
        for name in ("timeout_seconds", "hang_timeout_seconds"):
            value = getattr(self, name)
            if not (isfinite(value) and value > 0):
                raise ValueError(f"{name}={value!r}: a finite number of seconds above 0 is allowed")
