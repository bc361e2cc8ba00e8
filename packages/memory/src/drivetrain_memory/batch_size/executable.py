"""The answer of a search for a batch size, and the accumulation that keeps the global batch."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any


class TryOutcome(Enum):
    """The outcome of a try with one batch size, on one rank or on all of them."""

    FITS = "fits"
    OUT_OF_MEMORY = "out of memory"
    FAILED = "failed"


@dataclass(slots=True)
class ExecutableBatchSize:
    """The batch size of a search, to be kept with a run: a search that is given it begins with it.

    Attributes:
        batch_size: The samples of a micro-batch on one rank, of the try that runs or of the last one that fitted;
            None before the first try, and after one that did not fit.
    """

    batch_size: int | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return the answer, to be saved."""
        return {"batch_size": self.batch_size}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load an answer that was saved."""
        self.batch_size = state_dict["batch_size"]


def accumulation_steps(starting_batch_size: int, batch_size: int, *, steps: int = 1) -> int:
    """Return the micro-batches of `batch_size` that make up one step of `steps` micro-batches of the starting size.

    Rounded up: the global batch never shrinks, and grows by less than one micro-batch on each rank where the size
    does not divide it.

    Raises:
        ValueError: A number is below 1, or the batch size is above the starting one.
    """
    if min(starting_batch_size, batch_size, steps) < 1 or batch_size > starting_batch_size:
        raise ValueError(
            f"batch_size={batch_size}, starting_batch_size={starting_batch_size}, steps={steps}: each must be at "
            "least 1, and the batch size at most the starting one"
        )
    return -(-starting_batch_size * steps // batch_size)
