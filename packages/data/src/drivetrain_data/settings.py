"""The `data` section: how loaders are sharded."""

from dataclasses import dataclass, field
from typing import Literal

Even = Literal["uneven", "pad", "drop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSettings:
    """How loaders are sharded over ranks."""

    even: Even = field(
        default="uneven",
        metadata={
            "help": "an epoch's tail: uneven gives each sample once, pad repeats samples to fill the last batches, "
            "drop leaves the incomplete last batches out"
        },
    )
    split_batches: bool = field(
        default=False, metadata={"help": "a loader's batch size is that of all ranks together, not of one"}
    )
    dispatch: bool = field(
        default=False, metadata={"help": "rank 0 reads every batch and sends each rank its own; for streams"}
    )
    seed: int = field(
        default=0, metadata={"help": "seed of the shuffled order; every epoch has an order of its own"}
    )
    non_blocking: bool = field(
        default=True, metadata={"help": "copies to the device overlap with computing where memory is pinned"}
    )

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            ValueError: A value is outside its range; the message begins with the field's name.
        """
        if self.even not in ("uneven", "pad", "drop"):
            raise ValueError(f"even={self.even!r}: must be one of uneven, pad, drop")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed={self.seed!r}: must lie between 0 and 2**63 - 1")
