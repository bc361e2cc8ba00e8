"""Measure the steps of a training loop at the boundaries that the Accelerator owns."""

# Three hooks bring all that is measured: labels of the context's progress record (forward, backward, the optimizer's
# step, collectives, saves), the batches of prepared loaders, and the end of each optimizer step.

import logging
import socket
from collections.abc import Callable, Iterator, Mapping
from threading import get_ident
from typing import Any, TypeVar
from weakref import ref

import torch
from torch import Tensor

from drivetrain.device_clock import make_clock
from drivetrain.prepared import PreparedObjects
from drivetrain.rank_rows import RankRows
from drivetrain.step_flops import StepFlops, find_peak
from drivetrain_data import BatchPlan, LoaderTracker
from drivetrain_state import Context, gather_object
from drivetrain_tracking import (
    LiveLine,
    PhaseTimes,
    StepRecord,
    Straggler,
    Throughput,
    ThroughputMeter,
    TrackerGroup,
    TrackingSettings,
    find_straggler,
)
from drivetrain_tracking.throughput.phase_times import PHASES

logger = logging.getLogger(__name__)

Reading = TypeVar("Reading", bound=tuple[BatchPlan, Any, Any])

_WINDOW_STEPS = 50  # where no setting says how often the throughput is logged
_NO_TOKENS = -1.0
_COLLECTIVES = (
    *("gather", "reduce", "broadcast", "pad_across_processes"),
    *("gather_object", "broadcast_object", "barrier", "scatter"),
)
# A label of the progress record -> the phase, and whether it begins there.
_BOUNDARIES: Mapping[str, tuple[str, bool]] = {
    "forward": ("forward", True),
    "forward done": ("forward", False),
    "backward": ("backward", True),
    "backward done": ("backward", False),
    "optimizer step": ("optimizer", True),
    "averaging gradients at the window's close": ("communication", True),
    "gradients averaged": ("communication", False),
    "checkpoint": ("checkpoint", True),
    "checkpoint done": ("checkpoint", False),
    "export": ("checkpoint", True),
    "exported": ("checkpoint", False),
    **dict.fromkeys(_COLLECTIVES, ("communication", True)),
    **{f"{name} done": ("communication", False) for name in _COLLECTIVES},
}


class StepWatch:
    """A stopwatch of an Accelerator's steps. Not thread-safe; labels of other threads are left out.

    Args:
        context: The ranks and the device.
        settings: The `tracking` section.
        prepared: The prepared objects; not kept alive.
        reading: The loaders being read.
        readers: For each shard of the data, the first of the ranks that read it.
        trackers: The trackers to log to.
        mode: The precision of the run, such as "bf16".

    Attributes:
        count_tokens: A function from a batch to the number of tokens of this rank; None counts the elements of the
            field that the settings name.
    """

    def __init__(
        self,
        *,
        context: Context,
        settings: TrackingSettings,
        prepared: PreparedObjects,
        reading: LoaderTracker,
        readers: tuple[int, ...],
        trackers: TrackerGroup,
        mode: str,
    ) -> None:
        self.count_tokens: Callable[[Any], float] | None = None
        self._context = context
        self._settings = settings
        self._prepared = ref(prepared)  # it holds the optimizers, and these call `end_step`
        self._reading, self._readers, self._trackers, self._mode = reading, readers, trackers, mode
        self._thread = get_ident()
        self._times = PhaseTimes(make_clock(context.device))
        self._window_steps = settings.throughput_every_steps or _WINDOW_STEPS
        self._meter = ThroughputMeter(window_steps=self._window_steps)
        # Without the first step, in which ranks compile, allocate and tell the plan, each at its own pace.
        self._steady = ThroughputMeter(window_steps=self._window_steps)
        self._has_begun = False
        self._flops: StepFlops | None = None
        self._step: int | None = None  # the step that ended last
        # Samples and tokens of the newest batch, until it is counted.
        self._received: tuple[float | None, float | None] | None = None
        self._samples: float | None = 0.0  # of the open step
        self._tokens: float | None = 0.0
        self._counts: list[tuple[float | None, float | None]] = []  # of steps whose times are not known yet
        self._rows = RankRows(context)
        self._asked: Throughput | None = None  # the measurements whose gather is under way
        self._hosts: list[str] | None = None
        self._told: Straggler | None = None
        self._has_told_tokens = False
        self._line = LiveLine() if settings.live_line and context.topology.is_main else None
        self._is_first = True
        context.progress.observer = self.observe

    def observe(self, label: str) -> None:
        """Take a label of the progress record."""
        found = _BOUNDARIES.get(label)
        if found is None or get_ident() != self._thread:
            return
        phase, begins = found
        if begins:
            self._times.begin(phase)
            if phase == "backward":
                self._count_batch()
        else:
            self._times.end(phase)
        # A forward without gradients belongs to an evaluation, not to the step.
        if self._is_first and (phase == "backward" or (phase == "forward" and torch.is_grad_enabled())):
            self._look_at_flops(phase, begins=begins)

    def begin_wait(self) -> None:
        """Begin the part of a backward in which this rank waits for others: it has computed its gradients.

        May be called by a thread of autograd, while the loop's thread waits for the backward.
        """
        if self._times.innermost == "backward":
            self._times.begin("communication")

    def watch_reads(self, readings: Iterator[Reading]) -> Iterator[Reading]:
        """Hand on what a loader reads, and measure how long the loop waits for it."""
        end = object()
        while True:
            self._times.begin("data")
            try:
                reading = next(readings, end)
            finally:
                self._times.end("data")
            if reading is end:
                return
            plan, batch, _ = reading  # pyright: ignore[reportGeneralTypeIssues] it is no end
            self._received = _num_samples(plan), self._num_tokens(batch)
            yield reading  # pyright: ignore[reportReturnType]

    def end_step(self) -> None:
        """Tell the loaders that an optimizer has stepped; end the step if it is a new one. Called on all ranks."""
        self._reading.mark_stepped()
        self._times.end("optimizer")
        prepared = self._prepared()
        step = max((optimizer.num_steps for optimizer in prepared.optimizers), default=0) if prepared else 0
        if step == self._step:  # a skipped step, or another optimizer of the same one
            return
        before, self._step = self._step, step
        self._times.end_step()
        self._counts.append((self._samples, self._tokens))
        self._samples = self._tokens = 0.0
        self._end_first()
        self._read_steps()
        if before is not None:
            self._tell_ranks(before)
        every = self._settings.throughput_every_steps
        # Loops over loaders that were not prepared may have other numbers of steps on other ranks.
        together = self._context.topology.world_size == 1 or self._reading.current is not None
        if every is not None and step % every == 0 and together and not self._rows.is_pending:
            self._ask_ranks()
        if self._line is not None:
            self._line.show(step, self._meter.over_window())

    def over_window(self) -> Throughput:
        """Return the throughput of the last steps that this rank knows the times of."""
        self._read_steps()
        return self._meter.over_window()

    def in_total(self) -> Throughput:
        """Return the throughput since training began."""
        self._read_steps()
        return self._meter.in_total()

    def finish(self) -> None:
        """Log what was measured last, and take down the line. Called on all ranks, before the trackers finish."""
        if self._step is not None:
            self._tell_ranks(self._step, wait=True)
        self.close()

    def close(self) -> None:
        """Stop measuring, and drop what other ranks have not sent. May be called on any rank."""
        self._asked = None
        if self._context.progress.observer == self.observe:
            self._context.progress.observer = None
        if self._line is not None:
            self._line.close()

    def _count_batch(self) -> None:
        """Count the newest batch, once: batches without a backward are for evaluation."""
        if self._received is None:
            return
        samples, tokens = self._received
        self._received = None
        self._samples = None if self._samples is None or samples is None else self._samples + samples
        self._tokens = None if self._tokens is None or tokens is None else self._tokens + tokens

    def _num_tokens(self, batch: Any) -> float | None:
        if self.count_tokens is not None:
            return float(self.count_tokens(batch))
        field = batch.get(self._settings.token_field) if hasattr(batch, "get") else None
        if isinstance(field, Tensor):
            return float(field.numel())
        self._tell_no_tokens(batch)
        return None

    def _tell_no_tokens(self, batch: Any) -> None:
        """Warn once that a batch lacks the field that the settings name; the default field need not be there."""
        name = self._settings.token_field
        is_named = name != TrackingSettings().token_field
        if self._has_told_tokens or not is_named or not self._context.topology.is_main:
            return
        self._has_told_tokens = True
        fields = ", ".join(map(str, batch)) if hasattr(batch, "keys") else ""
        logger.warning(
            "token_field=%r: the batch, a %s, has no tensor of that name%s; throughput/tokens_per_second is left "
            "out. Name a field that every batch has, or count with accelerator.count_tokens(function)",
            name,
            type(batch).__name__,
            f" among its fields {fields}" if fields else "",
        )

    def _look_at_flops(self, phase: str, *, begins: bool) -> None:
        """Count the operations of the first step, where the peak of the device is known and they are not given."""
        if self._flops is None:
            if not begins:
                return
            self._meter = self._meter_with_peak()
            if self._meter.peak_flops is None or self._settings.flops_per_step is not None:
                self._is_first = False
                return
            self._flops = StepFlops()
        if begins:
            self._flops.begin(is_backward=phase == "backward")
        else:
            self._flops.end()

    def _meter_with_peak(self) -> ThroughputMeter:
        topology, prepared = self._context.topology, self._prepared()
        peak = self._settings.peak_flops
        if peak is None:
            models = [one.model for one in prepared.models] if prepared else []
            peak = find_peak(self._context.device, self._mode, models, is_main=topology.is_main)
        meter = ThroughputMeter(
            window_steps=self._window_steps, num_devices=topology.world_size, peak_flops=peak
        )
        meter.flops_per_step = self._settings.flops_per_step
        return meter

    def _end_first(self) -> None:
        if self._is_first and self._flops is not None:
            self._meter.flops_per_step = float(self._flops.total * self._context.topology.world_size)
            self._is_first, self._flops = False, None

    def _read_steps(self) -> None:
        for seconds in self._times.take_ready():
            samples, tokens = self._counts.pop(0)
            # Ranks have about equally many tokens; a gather brings the exact number of all.
            tokens = None if tokens is None else tokens * len(self._readers)
            record = StepRecord(phase_seconds=seconds, samples=samples, tokens=tokens)
            self._meter.add(record)
            if self._has_begun:
                self._steady.add(record)
            self._has_begun = True

    def _ask_ranks(self) -> None:
        """Begin to gather every rank's times. Called on all ranks."""
        now = self._meter.over_window()
        if self._hosts is None:
            self._hosts = gather_object(self._context, socket.gethostname())
        steady = self._steady.over_window()
        row = [steady.phase_seconds.get(phase, 0.0) for phase in PHASES]
        self._rows.begin([*row, _tokens_of_step(now, num_readers=len(self._readers))])
        self._asked = now

    def _tell_ranks(self, step: int, *, wait: bool = False) -> None:
        """Log the rows of a gather that is over, under the step before this one."""
        if (measured := self._asked) is None or self._hosts is None:
            return
        if (rows := self._rows.take(wait=wait)) is None:
            return
        self._asked = None
        if not self._context.topology.is_main:
            return
        metrics = measured.as_metrics()
        tokens = [rows[rank][-1] for rank in self._readers]
        if measured.steps_per_second is not None and _NO_TOKENS not in tokens:
            # Tokens are summed, not rates: each rank has a window of its own, but a step is a step for all.
            metrics["throughput/tokens_per_second"] = sum(tokens) * measured.steps_per_second
        straggler = find_straggler([dict(zip(PHASES, row, strict=False)) for row in rows])
        if straggler is not None:
            metrics["throughput/straggler/rank"] = straggler.rank
            metrics["throughput/straggler/slower_by_seconds"] = straggler.slower_by
        self._warn_of(straggler)
        if self._trackers.is_started:
            self._trackers.log(metrics, step=step)

    def _warn_of(self, straggler: Straggler | None) -> None:
        """Warn of a straggler, again only when it is another rank or phase."""
        told, self._told = self._told, straggler
        if straggler is None or self._hosts is None:
            return
        if told is not None and (told.rank, told.phase) == (straggler.rank, straggler.phase):
            return
        logger.warning(
            "rank %d (host %s) is slow: %s takes it %.3g s a step longer than the other ranks (%.3g s), which wait "
            "for it",
            straggler.rank,
            self._hosts[straggler.rank],
            straggler.phase,
            straggler.slower_by,
            straggler.usual_seconds,
        )


def _tokens_of_step(measured: Throughput, *, num_readers: int) -> float:
    """Return the number of this rank's tokens in a step, on average; `_NO_TOKENS` if it is unknown."""
    if measured.tokens_per_second is None or not measured.steps_per_second:
        return _NO_TOKENS
    return measured.tokens_per_second / measured.steps_per_second / num_readers


def _num_samples(plan: BatchPlan) -> float | None:
    """Return the number of real samples of a step on all ranks; None if it is unknown."""
    return None if plan.real_counts is None or plan.sizes is None else float(sum(plan.real_counts))
