"""Compare the batches that a program skips by its own count with the saved position of a resumed run.

A program may load only an optimizer's state, as transformers' Trainer does, and may have saved it before or after it
used a batch. Counts of batches of the same size are therefore not checked. Batches of another size hold other samples
than those read before. A loader with a loaded state continues by itself. If the program then skips the same number of
batches with `continue`, it never trains on them.
"""

import logging
from typing import Any

from drivetrain_accelerate.loaders.loader_adapter import DataLoaderAdapter, sharded_of
from drivetrain_accelerate.states.gradient_state import GradientState
from drivetrain_accelerate.states.partial_state import PartialState
from drivetrain_accelerate.strictness import is_strict
from drivetrain_data import DataStateError, ShardedLoader
from drivetrain_data.skipping_view import SkippedBatches

logger = logging.getLogger(__name__)

_INSTEAD = (
    "Resume with as many samples in each step of the optimizer as before (batch size x processes x accumulated "
    "micro-batches), by gradient_accumulation_steps for example"
)


def check_skipped(sharded: ShardedLoader[Any], num_batches: int) -> None:
    """Check the number of batches that a program skips in the first epoch after a resume."""
    state = GradientState()
    saved, stride = state.resumed_from, sharded.position_after(1)
    if not num_batches or saved is None:
        return
    state.resumed_from = None
    skipped = sharded.position_after(num_batches)
    if saved["stride"] != stride and skipped != saved["position"] and is_strict():
        raise DataStateError(
            f"skip_first_batches({num_batches}) leaves out {skipped} samples, {stride} in each batch of all "
            f"processes, but {saved['position']} of the epoch had been read when the optimizer's state was saved, "
            f"{saved['stride']} in each batch: some would be read twice or never. {_INSTEAD}; or begin the epoch "
            "anew (ignore_data_skip=True of transformers' Trainer); or read on regardless (--no-strict)"
        )


def check_epoch(sharded: ShardedLoader[Any], epoch: int) -> None:
    """Warn if the size of batches has changed, and the epoch that a program computed from steps is wrong."""
    state = GradientState()
    saved, stride = state.resumed_from, sharded.position_after(1)
    state.resumed_from = None
    if saved is None or saved["stride"] == stride or epoch in (saved["epoch"], saved["epoch"] + 1):
        return
    if PartialState().is_main_process:
        logger.warning(
            "epoch %d begins after a resume, but the optimizer's state was saved in epoch %d, when a batch of all "
            "processes moved %d samples on; now it moves %d. %s",
            epoch, saved["epoch"], saved["stride"], stride, _INSTEAD,
        )  # fmt: skip


class PassedBatches:
    """The batches that a loop over a resumed loader has received before the first backward."""

    def __init__(self, num_read: int) -> None:
        self._num_read = num_read
        self._num_received = 0
        self._is_checked = False
        self.has_ended = False  # whether the loop has come to the end of its epoch

    def receive(self) -> None:
        """Count a batch, if the loop goes on."""
        if not self.has_ended:
            self._num_received += 1

    def check(self, num_steps: int) -> None:
        """Raise a DataStateError at the first backward if the program skips batches twice; later calls do nothing."""
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
                "of the epoch had been read when the checkpoint was saved: the loader goes on after them by itself, "
                f"and the program would skip {passed} more. Leave out the program's own skip, such as `if step < "
                "resume_step: continue`; or have loaders begin their epoch anew, as Accelerate's do (--no-strict)"
            )


def count_passed_batches(loader: DataLoaderAdapter) -> PassedBatches | None:
    """Return a counter for a new loop; None if the loop does not resume, or the program skips batches already."""
    sharded = sharded_of(loader.sharded)
    if not sharded.is_resumed or isinstance(loader.sharded, SkippedBatches):
        return None
    return PassedBatches(sharded.position // sharded.position_after(1))
