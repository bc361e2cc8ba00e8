"""Measure the steps of a training loop at the boundaries that the Accelerator owns."""

# Three hooks bring all that is measured: marks of the context's progress record (forward, backward, the optimizer's
# step, collectives, saves), the batches of prepared loaders, and the end of each optimizer step.

from collections.abc import Callable, Iterator, Mapping, Sequence
from threading import get_ident
from typing import Any, Protocol, TypeVar
from weakref import ref

from torch import Tensor, nn

from drivetrain_data import BatchPlan, LoaderTracker
from drivetrain_state import Context, ProgressMark, reduce
from drivetrain_throughput.batch_counts import BatchCounts
from drivetrain_throughput.device_clock import make_clock
from drivetrain_throughput.flops.first_step_flops import FirstStepFlops
from drivetrain_throughput.live_line import LiveLine
from drivetrain_throughput.meter import StepRecord, Throughput, ThroughputMeter
from drivetrain_throughput.phase_times import PhaseTimes
from drivetrain_throughput.rank_throughput import RankThroughput
from drivetrain_tracking import TrackerGroup, TrackingSettings

Reading = TypeVar("Reading", bound=tuple[BatchPlan, Any, Any])

_WINDOW_STEPS = 50  # where no setting says how often the throughput is logged
# The marks at which a phase begins; it ends at the mark of the same name and _DONE.
_BEGINS: Mapping[str, Sequence[ProgressMark]] = {
    "forward": [ProgressMark.FORWARD],
    "backward": [ProgressMark.BACKWARD],
    "checkpoint": [ProgressMark.CHECKPOINT, ProgressMark.EXPORT],
    "communication": [
        ProgressMark.AVERAGING,
        ProgressMark.COMPARING,
        ProgressMark.GATHER,
        ProgressMark.REDUCE,
        ProgressMark.BROADCAST,
        ProgressMark.PAD,
        ProgressMark.GATHER_OBJECT,
        ProgressMark.BROADCAST_OBJECT,
        ProgressMark.BARRIER,
        ProgressMark.SCATTER,
    ],
}
# A mark of the progress record -> the phase, and whether it begins there. The optimizer ends its phase by `end_step`.
_BOUNDARIES: Mapping[ProgressMark, tuple[str, bool]] = {
    ProgressMark.OPTIMIZER_STEP: ("optimizer", True),
    **{mark: (phase, True) for phase, marks in _BEGINS.items() for mark in marks},
    **{
        ProgressMark[f"{mark.name}_DONE"]: (phase, False)
        for phase, marks in _BEGINS.items()
        for mark in marks
    },
}


class SupportsNumSteps(Protocol):
    """An optimizer that counts its steps."""

    @property
    def num_steps(self) -> int:
        """The number of steps so far, without skipped steps."""
        ...


class SupportsModel(Protocol):
    """A prepared model."""

    @property
    def model(self) -> nn.Module:
        """The module that computes."""
        ...


class TrainedObjects(Protocol):
    """The objects that a loop trains; the loop may prepare more of them later."""

    @property
    def models(self) -> Sequence[SupportsModel]:
        """The prepared models."""
        ...

    @property
    def optimizers(self) -> Sequence[SupportsNumSteps]:
        """The prepared optimizers."""
        ...


class StepWatch:
    """A stopwatch of an Accelerator's steps. Not thread-safe; labels of other threads are left out.

    Args:
        prepared: The prepared objects, held by a weak reference.
        is_probe: Return whether what trains is put back afterwards; it is not measured.
        reading: The loaders being read.
        mode: The precision of the run, such as "bf16".
        expert_counts: Return how often this rank's tokens chose each expert, by layers; None if no ranks divide any.

    Attributes:
        counts: The samples and tokens of each step.
    """

    def __init__(
        self,
        *,
        context: Context,
        settings: TrackingSettings,
        prepared: TrainedObjects,
        is_probe: Callable[[], bool],
        reading: LoaderTracker,
        trackers: TrackerGroup,
        mode: str,
        expert_counts: Callable[[nn.Module], Mapping[str, Tensor]] | None = None,
    ) -> None:
        self._expert_counts = expert_counts
        topology, every = context.topology, settings.throughput_every_steps
        self.counts = BatchCounts(settings.token_field, is_main=topology.is_main)
        self._context, self._every_steps = context, every
        self._prepared = ref(prepared)  # it holds the optimizers, and these call `end_step`
        self._reading, self._num_shards, self._trackers = reading, context.ranks("reads").size, trackers
        self._is_probe = is_probe
        self._thread = get_ident()
        self._times = PhaseTimes(make_clock(context.device))
        self._meter = ThroughputMeter(window_steps=every or _WINDOW_STEPS)
        self._meter.flops_per_step = settings.flops_per_step
        self._flops = FirstStepFlops(
            self._meter, context=context, settings=settings, mode=mode, models=self._models
        )
        self._ranks = RankThroughput(context, window_steps=every or _WINDOW_STEPS)
        self._step: int | None = None  # the step that ended last
        self._line = LiveLine() if settings.live_line and topology.is_main else None
        context.progress.add_observer(self.observe)

    def observe(self, label: str) -> None:
        """Note a label of the progress record."""
        # A program's own mark may have the text of a member.
        if not isinstance(label, ProgressMark) or get_ident() != self._thread or label not in _BOUNDARIES:
            return
        if self._is_probe():
            self._times.skip()
            return
        phase, begins = _BOUNDARIES[label]
        if begins:
            self._times.begin(phase)
        else:
            self._times.end(phase)
        if begins and phase == "backward":
            self.counts.count_received()
        self._flops.mark(phase, begins=begins)

    def begin_wait(self) -> None:
        """Begin the wait for other ranks in a backward, once this rank has computed its gradients.

        May be called by a thread of autograd, while the loop's thread waits for the backward.
        """
        if self._times.innermost == "backward":
            self._times.begin("communication")

    def watch_reads(self, readings: Iterator[Reading]) -> Iterator[Reading]:
        """Pass on a loader's readings, and measure how long the loop waits for each."""
        if self._is_probe():
            yield from readings
            return
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
            self.counts.receive(plan, batch)
            yield reading  # pyright: ignore[reportReturnType]

    def end_step(self) -> None:
        """End the step when an optimizer has stepped, unless it was skipped or is over. Called on all ranks."""
        if self._is_probe():
            return
        self._times.end("optimizer")
        prepared = self._prepared()
        step = max((optimizer.num_steps for optimizer in prepared.optimizers), default=0) if prepared else 0
        if step == self._step:  # a skipped step, or another optimizer of the same one
            return
        before, self._step = self._step, step
        self._times.end_step()
        self.counts.end_step()
        self._flops.end_step()
        self._read_steps()
        # Loops over loaders that were not prepared may have other numbers of steps on other ranks.
        together = self._context.topology.world_size == 1 or self._reading.current is not None
        is_due = self._every_steps is not None and step % self._every_steps == 0 and together
        if before is not None:
            # A gather is over at another time on each rank: whether the next one begins must not depend on it.
            self._log_ranks(before, wait=is_due)
        if is_due:
            self._ranks.begin(self._meter.over_window())
            self._log_experts(step)
        if self._line is not None:
            self._line.show(step, self._meter.over_window())

    def over_window(self) -> Throughput:
        """Return the throughput of the last steps whose times this rank knows."""
        self._read_steps()
        return self._meter.over_window()

    def in_total(self) -> Throughput:
        """Return the throughput since training began."""
        self._read_steps()
        return self._meter.in_total()

    def finish(self) -> None:
        """Log the last measurements, and remove the line. Called on all ranks, before the trackers finish."""
        if self._step is not None:
            self._log_ranks(self._step, wait=True)
        self.close()

    def close(self) -> None:
        """Stop measuring, and drop a gather that other ranks have not completed. May be called on any rank."""
        self._ranks.drop()
        self._context.progress.remove_observer(self.observe)
        if self._line is not None:
            self._line.close()

    def _models(self) -> list[nn.Module]:
        prepared = self._prepared()
        return [one.model for one in prepared.models] if prepared else []

    def _read_steps(self) -> None:
        """Add the steps whose times are known by now."""
        for seconds in self._times.take_ready():
            samples, tokens = self.counts.take_step()
            # Ranks have about equally many tokens; a gather brings the exact number of all.
            tokens = None if tokens is None else tokens * self._num_shards
            record = StepRecord(phase_seconds=seconds, samples=samples, tokens=tokens)
            self._meter.add(record)
            self._ranks.add(record)

    def _log_experts(self, step: int) -> None:
        """Log how many times the mean the busiest expert of each layer computes. Called on all ranks."""
        if self._expert_counts is None:
            return
        own = {name: one for model in self._models() for name, one in self._expert_counts(model).items()}
        # Each rank counts the tokens that it sends, other ones along every dimension.
        summed: Mapping[str, Tensor] = reduce(self._context, own, "sum", over="world") if own else own
        if summed and self._trackers.is_started:
            loads = {f"experts/{name}/load": one.max() / one.double().mean() for name, one in summed.items()}
            self._trackers.log(loads, step=step)

    def _log_ranks(self, step: int, *, wait: bool = False) -> None:
        """Log the metrics of a finished gather, under `step`."""
        metrics = self._ranks.take(wait=wait)
        if metrics is not None and self._trackers.is_started:
            self._trackers.log(metrics, step=step)
