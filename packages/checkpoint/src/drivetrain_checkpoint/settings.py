"""What can be set about checkpoints."""

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSettings:
    """The `checkpoint` section: where checkpoints go, and how many stay."""

    directory: Path | None = field(
        default=None,
        metadata={
            "help": "Folder of the checkpoints, seen by every host; by default below the project's folder."
        },
    )
    keep_last: int | None = field(
        default=None,
        metadata={"help": "Number of checkpoints to keep, the newest ones; by default all."},
    )

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            ValueError: A value is outside its range; the message begins with the field's name.
        """
        if self.keep_last is not None and self.keep_last < 1:
            raise ValueError(
                f"keep_last={self.keep_last!r}: must be at least 1 checkpoint; leave it unset to keep all"
            )
