"""Rates of a training loop over its last steps and over all steps. Pure: the caller passes each step's duration."""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from drivetrain_throughput.phase_times import PHASES


class Counts(NamedTuple):
    """The samples and tokens of a batch or of steps; None where they are unknown."""

    samples: float | None = 0.0
    tokens: float | None = 0.0

    def plus(self, other: "Counts") -> "Counts":
        """Return the sums of the counts; a count that is unknown on either side is unknown in the sum."""
        return Counts(*(None if a is None or b is None else a + b for a, b in zip(self, other, strict=True)))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """A measured step.

    Attributes:
        phase_seconds: The seconds in each phase; their sum is the step's duration.
        samples: The number of samples of all ranks; None if unknown.
        tokens: The number of tokens of all ranks; None if unknown.
    """

    phase_seconds: Mapping[str, float]
    samples: float | None = None
    tokens: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """The throughput of a number of steps. A rate is None where it is unknown.

    Attributes:
        num_steps: The number of steps measured.
        seconds: The duration of these steps.
        steps_per_second: Optimizer steps in a second.
        samples_per_second: Samples in a second, of all ranks.
        tokens_per_second: Tokens in a second, of all ranks.
        mfu: Model FLOPs utilisation: the fraction of the devices' peak that the model's operations reach.
        phase_seconds: The mean seconds that a step spends in each phase.
    """

    num_steps: int = 0
    seconds: float = 0.0
    steps_per_second: float | None = None
    samples_per_second: float | None = None
    tokens_per_second: float | None = None
    mfu: float | None = None
    phase_seconds: Mapping[str, float] = field(default_factory=dict[str, float])

    def as_metrics(self) -> dict[str, float]:
        """Return flat names and numbers to log, such as `throughput/steps_per_second`; unknown rates are left out."""
        names = ("samples_per_second", "tokens_per_second", "steps_per_second", "mfu")
        rates = {f"throughput/{name}": getattr(self, name) for name in names}
        metrics = {name: rate for name, rate in rates.items() if rate is not None}
        return metrics | {f"throughput/seconds/{name}": s for name, s in self.phase_seconds.items()}


class ThroughputMeter:
    """A meter of steps, over a sliding window and in total.

    Args:
        window_steps: The number of steps in the window.
        num_devices: The number of devices that compute the steps.
        peak_flops: The peak of one device in FLOP/s; None leaves `mfu` unknown.

    Attributes:
        peak_flops: The peak of all devices in FLOP/s.
        flops_per_step: The floating point operations of a step on all devices; None leaves `mfu` unknown.

    Raises:
        ValueError: An argument is out of range.

    Example:
        >>> meter = ThroughputMeter(window_steps=10, num_devices=2, peak_flops=1e12)
        >>> meter.flops_per_step = 1e11
        >>> meter.add(StepRecord(phase_seconds={"forward": 0.05, "backward": 0.05}, samples=32))
        >>> now = meter.over_window()
        >>> round(now.samples_per_second), round(now.mfu, 2)
        (320, 0.5)
    """

    def __init__(
        self, *, window_steps: int = 50, num_devices: int = 1, peak_flops: float | None = None
    ) -> None:
        for name, number in (("window_steps", window_steps), ("num_devices", num_devices)):
            if number < 1:
                raise ValueError(f"{name}={number!r}: must be at least 1")
        if peak_flops is not None and not peak_flops > 0:
            raise ValueError(
                f"peak_flops={peak_flops!r}: must be above 0, in FLOP/s, or None if it is unknown"
            )
        self.flops_per_step: float | None = None
        self.peak_flops = None if peak_flops is None else peak_flops * num_devices
        self._window: deque[StepRecord] = deque(maxlen=window_steps)
        self._total = _Sums()

    def add(self, step: StepRecord) -> None:
        """Add a step."""
        self._window.append(step)
        self._total.add([step])

    def over_window(self) -> Throughput:
        """Return the throughput of the last `window_steps` steps."""
        sums = _Sums()
        sums.add(self._window)
        return self._throughput(sums)

    def in_total(self) -> Throughput:
        """Return the throughput of all steps."""
        return self._throughput(self._total)

    def _throughput(self, sums: "_Sums") -> Throughput:
        seconds = sum(sums.phase_seconds.values())
        if not sums.num_steps or not seconds > 0:
            return Throughput(num_steps=sums.num_steps)
        steps_per_second, (samples, tokens) = sums.num_steps / seconds, sums.counts
        mfu = None
        if self.flops_per_step is not None and self.peak_flops is not None:
            mfu = self.flops_per_step * steps_per_second / self.peak_flops
        return Throughput(
            num_steps=sums.num_steps,
            seconds=seconds,
            steps_per_second=steps_per_second,
            samples_per_second=None if samples is None else samples / seconds,
            tokens_per_second=None if tokens is None else tokens / seconds,
            mfu=mfu,
            phase_seconds={name: s / sums.num_steps for name, s in sums.phase_seconds.items()},
        )


class _Sums:
    """The sums of some steps."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.counts = Counts()
        self.phase_seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)

    def add(self, steps: Iterable[StepRecord]) -> None:
        for step in steps:
            self.num_steps += 1
            self.counts = self.counts.plus(Counts(step.samples, step.tokens))
            for name, seconds in step.phase_seconds.items():
                self.phase_seconds[name] = self.phase_seconds.get(name, 0.0) + seconds
