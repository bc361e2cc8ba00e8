"""The settings of tracking."""

from dataclasses import dataclass, field
from typing import Literal, get_args

OnError = Literal["raise", "warn"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackingSettings:
    """The `tracking` section: what happens when a tracker fails, and when values are on the disk."""

    on_error: OnError = field(
        default="raise",
        metadata={
            "help": "Handling of a failing tracker: raise ends the run, warn logs a warning and continues."
        },
    )
    flush_seconds: float = field(
        default=1.0,
        metadata={
            "help": "Seconds between flushes of the log to the disk: what a crash of the machine may lose."
        },
    )
    drain_seconds: float = field(
        default=30.0,
        metadata={
            "help": "Seconds that the end of a run waits for platforms to take what is left in the log."
        },
    )
    record_info: bool = field(
        default=True,
        metadata={"help": "Whether the log tells commit and changes, versions, hardware and command line."},
    )

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            ValueError: A value is not allowed; the message begins with the field's name.
        """
        if self.on_error not in get_args(OnError):
            raise ValueError(f"on_error={self.on_error!r}: say one of {', '.join(get_args(OnError))}")
        for name in ("flush_seconds", "drain_seconds"):
            if not (seconds := getattr(self, name)) > 0:
                raise ValueError(f"{name}={seconds!r}: must be above 0")
