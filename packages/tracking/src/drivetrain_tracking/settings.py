"""The settings of tracking."""

from dataclasses import dataclass, field
from typing import Literal, get_args

OnError = Literal["raise", "warn"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackingSettings:
    """The `tracking` section: what happens when a tracker fails."""

    on_error: OnError = field(
        default="raise",
        metadata={
            "help": "Handling of a failing tracker: raise ends the run, warn logs a warning and continues."
        },
    )

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            ValueError: A value is not allowed; the message begins with the field's name.
        """
        if self.on_error not in get_args(OnError):
            raise ValueError(f"on_error={self.on_error!r}: say one of {', '.join(get_args(OnError))}")
