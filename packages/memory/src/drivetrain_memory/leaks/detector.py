"""The leak detector: cheap measurements at every step, and an investigation once memory grows."""

import gc
import logging
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from typing import Self

from drivetrain_memory.compat import WORKERS_ITERATOR, workers_of
from drivetrain_memory.freeing.live_objects import live_objects
from drivetrain_memory.leaks.cycles import collect_cycles
from drivetrain_memory.leaks.findings import LeakReport, grown_holders, has_grown, unexplained, with_graphs
from drivetrain_memory.leaks.growth import LEAST_POINTS, Growth, is_fragmented
from drivetrain_memory.leaks.measure import SUSPICIOUS, Measurements, MemorySample, measure, measure_collected
from drivetrain_memory.leaks.named_memory import Census, take_census
from drivetrain_memory.leaks.roots import line_that_made

logger = logging.getLogger(__name__)

_TRACED_FRAMES = 16
# The measurement that each kind of memory without a name belongs to.
_SERIES = {"native": "heap_used", "worker": "children", "pinned": "pinned", "device": "device_allocated"}
_CONFIRMED_SHARE = 0.5  # of the rate before: the rest was garbage, which the investigation collects


class LeakDetector:
    """A detector of memory that grows from step to step, on the host and the accelerator.

    Each `step` measures in some 50 microseconds. Every few steps the measurements are fitted. If a measurement grows
    beyond warm-up, garbage is collected, and again a few steps later. If memory grew between these collections, an
    investigation begins: for `investigation_steps` steps allocations are traced, which slows Python down, and the
    objects that names hold are counted before and after, about a second each. Growth that has ended is dismissed.
    Ranks do not communicate.

    Args:
        warmup_steps: The number of first steps that are not fitted.
        check_every: The number of steps between two fits.
        investigation_steps: The number of steps of an investigation.
        least_bytes_per_step: The smallest growth that counts as a leak; a growing list of numbers stays below.
        trace: Whether an investigation traces where objects are made.
        on_leak: A function that takes the report of each leak that is found; None logs a warning.

    Raises:
        ValueError: A number of steps is below 1.
        TypeError: `on_leak` cannot be called.

    Example:
        >>> with LeakDetector() as detector:
        ...     for _ in range(3):
        ...         detector.step()
        >>> detector.report is None
        True
    """

    def __init__(
        self,
        *,
        warmup_steps: int = 10,
        check_every: int = 8,
        investigation_steps: int = 12,
        least_bytes_per_step: float = 200.0,
        trace: bool = True,
        on_leak: Callable[[LeakReport], object] | None = None,
    ) -> None:
        for name, value in (("check_every", check_every), ("investigation_steps", investigation_steps)):
            if value < 1:
                raise ValueError(f"{name}={value!r}: must be at least 1 step")
        if warmup_steps < 0:
            raise ValueError(f"warmup_steps={warmup_steps!r}: must be 0 or more steps")
        if on_leak is not None and not callable(on_leak):  # the call may come hours later
            raise TypeError(f"on_leak={on_leak!r}: give a function of a report, such as print")
        self._warmup_steps = warmup_steps
        self._check_every = check_every
        self._investigation_steps = investigation_steps
        self._least_rate = least_bytes_per_step
        self._trace = trace
        self._on_leak = on_leak
        self._step = 0
        self._samples = Measurements()
        self._next_check = warmup_steps + 2 * LEAST_POINTS
        self._suspected: MemorySample | None = None
        self._investigation: _Investigation | None = None
        self._report: LeakReport | None = None

    @property
    def report(self) -> LeakReport | None:
        """The report of the last investigation; None before one has ended."""
        return self._report

    @property
    def growth(self) -> dict[str, Growth]:
        """The growth of each measurement after warm-up, by name, over the newer half of the steps."""
        return self._samples.growth()

    def step(self) -> None:
        """Measure at the end of a step; begin or end an investigation if due."""
        self._step += 1
        if self._investigation is not None:
            if self._step >= self._investigation.first.step + self._investigation_steps:
                self._end(self._investigation)
            return
        if self._step <= self._warmup_steps:
            return
        if self._step % self._samples.stride == 0:
            self._samples.add(measure(self._step))
        if self._step >= self._next_check:
            self._next_check = self._step + self._check_every * self._samples.stride
            self._suspect()

    def investigate(self) -> None:
        """Begin an investigation, which ends `investigation_steps` later; RuntimeError if one is under way."""
        if self._investigation is not None:
            raise RuntimeError(
                "an investigation is under way: it ends by itself, after investigation_steps steps"
            )
        self._investigation = _Investigation(self._step, trace=self._trace)

    def close(self) -> None:
        """Give up a running investigation and its trace."""
        if self._investigation is not None:
            self._investigation.stop_tracing()
            self._investigation = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _suspect(self) -> None:
        """Collect garbage once a measurement grows; at the next check, investigate if memory still grew."""
        if self._suspected is not None:
            first, self._suspected = self._suspected, None
            if has_grown(first, measure_collected(self._step), self._least_rate):
                self.investigate()
            else:
                self._dismiss()
        elif any(self.growth[name].goes_on for name in SUSPICIOUS):
            self._suspected = measure_collected(self._step)

    def _dismiss(self) -> None:
        """Dismiss growth that has ended or was garbage: fit only later steps, and double the check interval."""
        self._samples.clear()
        self._check_every *= 2
        self._next_check = self._step + max(2 * LEAST_POINTS, self._check_every) * self._samples.stride

    def _end(self, investigation: "_Investigation") -> None:
        self._investigation = None
        self._report = report = investigation.end(self._step, self.growth, least_rate=self._least_rate)
        self._dismiss()
        if report.leaks and self._on_leak is not None:
            self._on_leak(report)
        elif report.leaks:
            logger.warning("%s", report)


class _Investigation:
    """The state at the beginning of an investigation."""

    def __init__(self, step: int, *, trace: bool) -> None:
        gc.collect()
        self._census: Census = take_census()
        for holding in self._census.values():
            holding.samples.clear()  # they would stay alive until the end
        self._traces = trace and not tracemalloc.is_tracing()
        if self._traces:
            tracemalloc.start(_TRACED_FRAMES)
        self.first = measure_collected(step)

    def stop_tracing(self) -> None:
        """Stop tracing allocations, unless the user started the tracing."""
        if self._traces:
            tracemalloc.stop()

    def end(self, step: int, growth: dict[str, Growth], *, least_rate: float) -> LeakReport:
        """Compare the state at the beginning with the current state, and return the report."""
        cycles = collect_cycles()
        last = measure_collected(step)
        census = take_census()
        named = grown_holders(self._census, census, step - self.first.step, least_rate=least_rate)
        workers = {
            pid: name for one in live_objects(WORKERS_ITERATOR) for pid, name in workers_of(one).items()
        }
        others = unexplained(self.first, last, named, workers=workers)
        named, others = with_graphs(named, others)
        # Memory without a name counts if its measurement grew before too, and now not much slower.
        fits = [growth[_SERIES[one.kind]] for one in others]
        leaks = [
            one
            for one, fit in zip(others, fits, strict=True)
            if fit.goes_on and one.bytes_per_step >= _CONFIRMED_SHARE * fit.rate
        ]
        for one in named:
            line = next(filter(None, map(line_that_made, one.samples)), None)
            leaks.append(replace(one, line=line, samples=()))
        self.stop_tracing()
        return LeakReport(
            first_step=self.first.step,
            last_step=step,
            leaks=sorted(leaks, key=lambda one: -one.bytes_per_step),
            cycles=cycles,
            is_fragmented=is_fragmented(growth),
            growth=growth,
        )
