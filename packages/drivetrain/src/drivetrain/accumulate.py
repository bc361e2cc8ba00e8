"""One micro-batch of an accumulation window, as a context."""

from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType

from drivetrain_backends import AccumulationWindow, Prepared
from drivetrain_data import ActiveLoaders


class MicroBatch:
    """Begins a micro-batch on entry; while the window stays open, gradients stay on their rank inside.

    An Accelerator keeps one and enters it for every batch: nothing is allocated in the loop.

    Args:
        window: The window whose micro-batches these are.
        loaders: The loaders being read; the last batch of one closes the window early.

    Attributes:
        models: The models whose gradients are held back; set before entry.
        is_open: Whether the loop is inside.
    """

    __slots__ = ("_held", "_loaders", "is_open", "models", "window")

    def __init__(self, window: AccumulationWindow, loaders: ActiveLoaders) -> None:
        self.window = window
        self.models: Sequence[Prepared] = ()
        self.is_open = False
        self._loaders = loaders
        self._held: ExitStack | None = None

    def __enter__(self) -> None:
        loader = self._loaders.current
        self.window.begin(
            is_last=loader is not None and loader.current is not None and loader.current.is_last
        )
        self.is_open = True
        if not self.window.closing:
            self._held = ExitStack()
            for prepared in self.models:
                self._held.enter_context(prepared.no_sync())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.is_open = False
        if self._held is not None:
            self._held.close()
            self._held = None
