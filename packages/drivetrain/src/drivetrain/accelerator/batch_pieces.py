"""Count the micro-batches of each batch, to find the last micro-batch of a loader's last batch."""

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
        batch: The number of batches that the loader has handed out.
        num: The number of the batch's micro-batches so far.
        expected: The number of micro-batches of the batch before; 1 for the first batch.
        is_told: Whether the program passed `last=` for one of the batch's micro-batches.
    """

    batch: int
    num: int = 0
    expected: int = 1
    is_told: bool = False


class BatchPieces:
    """Finds the micro-batch that ends an epoch: the last batch must have as many micro-batches as the batch before.

    A loop may train a batch whole, in several micro-batches, or read several loaders in turns; the number of
    micro-batches between two batches of a loader tells these apart. A last batch with another number is refused.
    """

    def __init__(self) -> None:
        self._of: WeakKeyDictionary[Planned, _Pieces] = WeakKeyDictionary()

    def count(self, reading: LoaderTracker, *, is_told: bool = False) -> bool:
        """Count a micro-batch, and return whether it completes a loader's last batch.

        In nested loops, a micro-batch counts for both loaders' batches, but can complete only the inner loader's.

        Args:
            reading: The loaders being read, to whose current batches the micro-batch belongs.
            is_told: Whether the program passed `last=` for the micro-batch.

        Raises:
            AccumulationError: The micro-batch before had already completed a loader's last batch.
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
        """Raise an error if a loader ends while the window still waits for micro-batches of the last batch."""
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
