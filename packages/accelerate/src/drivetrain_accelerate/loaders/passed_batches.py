"""Find that a program passes over the batches that a resumed loader has left out already.

Some programs count the batches of the epoch they go on in, and `continue` until they come to the first that they have
not trained on. A loader that goes on by itself then begins behind it, and as many batches more would train nothing.
"""

from drivetrain_accelerate.loaders.loader_adapter import DataLoaderAdapter, sharded_of
from drivetrain_data import DataStateError
from drivetrain_data.skipping_view import SkippedBatches


class PassedBatches:
    """The batches that a loop over a resumed loader has received before the first backward.

    Args:
        num_read: The number of batches of the epoch that were read before the checkpoint was saved.

    Attributes:
        has_ended: Whether the loop has come to the end of its epoch.
    """

    def __init__(self, num_read: int) -> None:
        self._num_read = num_read
        self._num_received = 0
        self._is_checked = False
        self.has_ended = False

    def receive(self) -> None:
        """Count a batch, if the loop goes on."""
        if not self.has_ended:
            self._num_received += 1

    def check(self, num_steps: int) -> None:
        """Check them at the first backward, and no more at later ones.

        Args:
            num_steps: The number of micro-batches in an optimizer step, which a program may take at once.

        Raises:
            DataStateError: The program has passed over as many as were read before, or over all that were left.
        """
        if self._is_checked:
            return
        self._is_checked = True
        if self.has_ended:
            passed, is_skip = self._num_received, 0 < self._num_received <= self._num_read
        else:
            passed = self._num_received - 1
            is_skip = 0 < passed == self._num_read and self._num_received > num_steps
        if is_skip:
            raise DataStateError(
                f"{passed} batches were passed over before the first backward after load_state, and {self._num_read} "
                "of the epoch had been read when the checkpoint was saved: the loader goes on behind them by itself, "
                f"and {passed} others would train nothing. Leave out the program's own skip, such as `if step < "
                "resume_step: continue`; or have loaders begin their epoch anew, as Accelerate's do (--no-strict)"
            )


def passed_batches(loader: DataLoaderAdapter) -> PassedBatches | None:
    """Return the count for a loop that begins; None if it does not go on in an epoch, or the program has skipped."""
    sharded = sharded_of(loader.sharded)
    if not sharded.is_resumed or isinstance(loader.sharded, SkippedBatches):
        return None
    return PassedBatches(sharded.position // sharded.position_after(1))
