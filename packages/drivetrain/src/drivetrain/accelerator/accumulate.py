"""A context for one micro-batch of an accumulation window."""

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from types import TracebackType

from torch import nn

from drivetrain.accelerator.batch_pieces import BatchPieces
from drivetrain.accelerator.half_check import HalfCheck
from drivetrain.parts.parts import Parts
from drivetrain_backends import AccumulationWindow
from drivetrain_data.active_loaders import Planned


class MicroBatch:
    """A context that begins a micro-batch on entry. Gradients are reduced inside only if the window closes.

    An Accelerator keeps one instance and enters it for every batch, so that the loop allocates no contexts.

    Args:
        parts: The parts of the Accelerator; the last micro-batch of a loader's last batch closes the window early.
        check: The check for operations in half precision; None if the settings do not ask for it.

    Attributes:
        models: The models whose gradients are not reduced in an open window, all if empty; set before entry.
        last: Whether the micro-batch closes the window before it is full; None closes the window if the micro-batch
            completes a loader's last batch. Set before entry.
        is_open: Whether the loop is inside the context.
    """

    def __init__(self, parts: Parts, *, check: HalfCheck | None = None) -> None:
        self.models: Sequence[nn.Module] = ()
        self.last: bool | None = None
        self.is_open = False
        self._window = parts.backend.window
        self._reading = parts.reading
        self._prepared = parts.prepared
        self._check = check
        self._held: ExitStack | None = None
        self._pieces = BatchPieces()
        parts.reading.on_finish = partial(_check_end, self._window, self._pieces)

    def __enter__(self) -> None:
        window, last = self._window, self.last
        if window.next_num_micro_batches > 1 or not window.closing:
            ends = self._pieces.count(self._reading, is_told=last is not None)
            last = ends if last is None else last
            for optimizer in self._prepared.optimizers:  # whose rates must not change in an open window
                # The previous micro-batch closed its window: this one begins the next.
                if window.closing:
                    optimizer.begin_window()
                else:
                    optimizer.check_window()
        window.begin(is_last=bool(last))
        if not window.closing:
            models = self._prepared.models
            chosen = [self._prepared.of(model) for model in self.models] if self.models else models
            self._held = ExitStack()
            for prepared in chosen:
                self._held.enter_context(prepared.no_sync())
        if self._check is not None:
            self._check.enter()
        self.is_open = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.is_open = False
        self.models = ()  # otherwise the models would live as long as the Accelerator
        if self._check is not None:
            self._check.leave(is_last=self._window.closing)
        if error is not None:
            self._window.fail()
        if self._held is not None:
            self._held.close()
            self._held = None


def _check_end(window: AccumulationWindow, pieces: BatchPieces, loader: Planned) -> None:
    """Check a loader that ends in an open window. A method would make loaders hold the Accelerator's models."""
    if not window.closing:
        pieces.check_end(loader)
