"""The progress marks of a rank, cheap enough to set at every batch, collective and step."""

from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import ExitStack
from enum import StrEnum
from threading import get_ident

from torch.autograd import profiler

from drivetrain_state.compat import is_profiled

_KEPT_LABELS = 8  # about two steps


class ProgressMark(StrEnum):
    """The begin or end of a part of a step. The value is the text that the watchdog shows.

    Observers of a `ProgressRecord` recognize these members, but not strings of the same text, which a program may use
    as labels.
    """

    # Reports of hangs show marks with !r, as plain text.
    __repr__ = str.__repr__

    FORWARD = "forward"
    FORWARD_DONE = "forward done"
    BACKWARD = "backward"
    BACKWARD_DONE = "backward done"
    OPTIMIZER_STEP = "optimizer step"
    AVERAGING = "averaging gradients at the window's close"
    AVERAGING_DONE = "gradients averaged"
    COMPARING = "comparing the order of blocks at the step"
    COMPARING_DONE = "order of blocks compared"
    BATCH = "batch"
    SAVE = "save"
    WRITE_CHECKPOINT = "write a checkpoint"
    SAVED = "saved"
    LOAD = "load"
    COMPILE = "compile an operator"
    CHECKPOINT = "checkpoint"
    CHECKPOINT_DONE = "checkpoint done"
    EXPORT = "export"
    EXPORT_DONE = "exported"
    GATHER = "gather"
    GATHER_DONE = "gather done"
    REDUCE = "reduce"
    REDUCE_DONE = "reduce done"
    BROADCAST = "broadcast"
    BROADCAST_DONE = "broadcast done"
    PAD = "pad_across_processes"
    PAD_DONE = "pad_across_processes done"
    GATHER_OBJECT = "gather_object"
    GATHER_OBJECT_DONE = "gather_object done"
    BROADCAST_OBJECT = "broadcast_object"
    BROADCAST_OBJECT_DONE = "broadcast_object done"
    BARRIER = "barrier"
    BARRIER_DONE = "barrier done"
    SCATTER = "scatter"
    SCATTER_DONE = "scatter done"


# Each mark that ends a part of a step, with the mark that begins it.
_BEGINNINGS: dict[str, ProgressMark] = {
    ProgressMark.SAVED: ProgressMark.SAVE,
    **{
        end: ProgressMark[beginning]
        for end in ProgressMark
        if (beginning := end.name.removesuffix("_DONE")) != end.name
    },
}
_BEGIN = frozenset(_BEGINNINGS.values())


class ProfileRanges:
    """The marks of a rank as ranges of the profile that torch's profiler records.

    A mark that another mark ends is a range, and any other label an instant. A range that an exception left open ends
    with the range around it, or at the next batch.
    """

    def __init__(self) -> None:
        # Of each thread, the innermost range last; torch ends a range in the thread that began it.
        self._open: defaultdict[int, list[tuple[str, ExitStack]]] = defaultdict(list)
        self.num_open = 0

    def follow(self, label: str) -> None:
        """Add a label to the profile. An end is followed also after the profile, whose range it closes."""
        is_open = self._open[get_ident()]
        if label in _BEGINNINGS:
            beginning = _BEGINNINGS[label]
            begun = [index for index, (name, _) in enumerate(is_open) if name == beginning]
            self._close(is_open, down_to=begun[-1] if begun else len(is_open))
            return
        if label is ProgressMark.BATCH:
            self._close(is_open, down_to=0)
        if not is_profiled():
            return
        opened = ExitStack()
        opened.enter_context(profiler.record_function(f"drivetrain: {label}"))
        is_open.append((label, opened))
        self.num_open += 1
        if label not in _BEGIN:
            self._close(is_open, down_to=len(is_open) - 1)

    def _close(self, is_open: list[tuple[str, ExitStack]], *, down_to: int) -> None:
        while len(is_open) > down_to:
            is_open.pop()[1].close()
            self.num_open -= 1


class ProgressRecord:
    """The last progress of this process. The watchdog reads it from another thread; marking never waits or allocates.

    Observers, such as a stopwatch, get every label, and so does the profile that torch's profiler records; `note`
    informs these alone. A label that observers recognize is a `ProgressMark`; other labels are any text.

    Attributes:
        count: The number of marks. The watchdog times its changes, so that a mark reads no clock.
        label: The last progress, such as `"optimizer step"`.
        recent: The labels of the last marks, the newest last.
        thread_id: The thread that made the last mark (or created the record), whose stack is shown for a hang.
        observers: The functions that get every label, in the thread that marks.
        forward_observers: The functions that get each model whose forward begins, in its thread.

    Example:
        >>> record = ProgressRecord()
        >>> record.mark("optimizer step")
        >>> record.count, record.label
        (1, 'optimizer step')
    """

    __slots__ = ("_ranges", "count", "forward_observers", "label", "observers", "recent", "thread_id")

    def __init__(self) -> None:
        self.count: int = 0
        self.label: str = "start"
        self.recent: deque[str] = deque(maxlen=_KEPT_LABELS)
        self.thread_id: int = get_ident()
        self.observers: tuple[Callable[[str], None], ...] = ()
        self._ranges = ProfileRanges()
        self.forward_observers: tuple[Callable[[object], None], ...] = ()

    def mark(self, label: str) -> None:
        """Record progress; `label` names the operation that just finished or began, in a word or two."""
        self.label = label
        self.recent.append(label)
        self.thread_id = get_ident()
        self.count += 1
        if is_profiled() or self._ranges.num_open:
            self._ranges.follow(label)
        for observe in self.observers:
            observe(label)

    def note(self, label: str) -> None:
        """Send a label to the profile and the observers only; the watchdog's record is unchanged."""
        if is_profiled() or self._ranges.num_open:
            self._ranges.follow(label)
        for observe in self.observers:
            observe(label)

    @property
    def is_heard(self) -> bool:
        """True if an observer or a profile gets the labels of `note`."""
        return bool(self.observers) or is_profiled() or self._ranges.num_open > 0

    def note_forward(self, model: object) -> None:
        """Announce that a model's forward begins: its label to all observers, the model to forward observers."""
        self.note(ProgressMark.FORWARD)
        for observe in self.forward_observers:
            observe(model)

    def add_observer(self, observe: Callable[[str], None]) -> None:
        """Add a function that gets every label."""
        self.observers = (*self.observers, observe)

    def remove_observer(self, observe: Callable[[str], None]) -> None:
        """Remove a function of `add_observer`; do nothing if it is absent."""
        self.observers = tuple(each for each in self.observers if each != observe)

    def add_forward_observer(self, observe: Callable[[object], None]) -> None:
        """Add a function that gets each model whose forward begins."""
        self.forward_observers = (*self.forward_observers, observe)

    def remove_forward_observer(self, observe: Callable[[object], None]) -> None:
        """Remove a function of `add_forward_observer`; do nothing if it is absent."""
        self.forward_observers = tuple(each for each in self.forward_observers if each != observe)
