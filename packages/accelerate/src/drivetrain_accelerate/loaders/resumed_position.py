"""Compare where a resumed program reads on with where it was when the optimizer's state was saved.

The program counts batches by itself, as transformers' Trainer does. Batches of the same size are its own business: it
may have saved before or after it used one. Of another size, they are other samples than those that were read.
"""

import logging
from typing import Any

from drivetrain_accelerate.states.gradient_state import GradientState
from drivetrain_accelerate.states.partial_state import PartialState
from drivetrain_accelerate.strictness import is_strict
from drivetrain_data import DataStateError, ShardedLoader

logger = logging.getLogger(__name__)

_INSTEAD = (
    "Resume with as many samples in each step of the optimizer as before (batch size x processes x accumulated "
    "micro-batches), by gradient_accumulation_steps for example"
)


def check_skipped(sharded: ShardedLoader[Any], num_batches: int) -> None:
    """Check the number of batches that a program skips in the epoch it goes on in.

    Raises:
        DataStateError: They have become larger or smaller, and are not the samples that were read.
    """
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
    """Warn of an epoch that a program has counted in steps, which other sizes of batches change."""
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
