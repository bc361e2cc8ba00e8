"""The micro-batches that each batch is trained in: which one is the last of a loader's last batch."""

from dataclasses import dataclass
from weakref import WeakKeyDictionary

from drivetrain_backends import AccumulationError
from drivetrain_data import LoaderTracker
from drivetrain_data.active_loaders import Planned

_SAY = (
    "Where batches are trained in different numbers of micro-batches, say which one is the last: "
    "accelerator.accumulate(model, last=...), True for the last one of a loader's last batch, and False for others"
)


@dataclass(slots=True)
class _Pieces:
    """The micro-batches of a loader's current batch.

    Attributes:
        batch: The batch, as the loader counts them.
        num: The number of its micro-batches so far.
        expected: The number of those of the batch before it; 1 before the first.
        is_told: Whether the program passed `last=` for one of them.
    """

    batch: int
    num: int = 0
    expected: int = 1
    is_told: bool = False


class BatchPieces:
    """Finds the micro-batch that ends an epoch: the last of the last batch, which has as many as the one before it.

    A loop may train a batch whole, in several micro-batches, or read several loaders in turns; the number of
    micro-batches between two batches of a loader tells which. A last batch of another number is refused.
    """

    def __init__(self) -> None:
        self._of: WeakKeyDictionary[Planned, _Pieces] = WeakKeyDictionary()

    def count(self, reading: LoaderTracker, *, is_told: bool = False) -> bool:
        """Count a micro-batch, and return whether it is the last one of a last batch.

        A loop inside another one has its own ends: meanwhile the outer loader's batch counts on and ends nothing.

        Args:
            reading: The loaders being read, to whose current batches the micro-batch belongs.
            is_told: Whether the program says by itself whether the micro-batch is the last.

        Raises:
            AccumulationError: The last batch of a loader was done with the micro-batch before.
        """
        for loader in reading.being_read:
            pieces, batch = self._of.get(loader), loader.num_received
            if pieces is None:
                pieces = self._of[loader] = _Pieces(batch)
            elif pieces.batch != batch:
                pieces.batch, pieces.expected, pieces.num, pieces.is_told = batch, pieces.num, 0, False
            pieces.num += 1
            pieces.is_told |= is_told
        ends = False
        for loader in reading.read_in_turns():
            plan, pieces = loader.current, self._of[loader]
            if plan is None or not plan.is_last or pieces.is_told:
                continue
            if pieces.num > pieces.expected:
                raise AccumulationError(
                    f"accumulate(): micro-batch {pieces.num} of a loader's last batch, whose window has closed with "
                    f"{_number(pieces.expected)}, as many as the batch before it had. {_SAY}"
                )
            ends |= pieces.num == pieces.expected
        return ends

    def check_end(self, loader: Planned) -> None:
        """Refuse that a loader ends where the window still waits for micro-batches of its last batch."""
        pieces = self._of.get(loader)
        if pieces is None or pieces.batch != loader.num_received or pieces.is_told:
            return
        if pieces.num < pieces.expected:
            raise AccumulationError(
                f"the loader's last batch had {_number(pieces.num)}, and the batch before it {pieces.expected}: the "
                f"window is still open, and its gradients would go into the next epoch. {_SAY}"
            )


def _number(num: int) -> str:
    return f"{num} micro-batch" if num == 1 else f"{num} micro-batches"
