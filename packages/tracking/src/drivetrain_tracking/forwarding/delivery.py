"""The progress of a log's delivery to one platform, kept in a file that is always replaced as a whole."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from drivetrain_tracking.errors import DeliveryFileError
from drivetrain_tracking.spool.files import read_json, replace_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """The progress of a delivery; offsets are positions in the log, in bytes."""

    offset: int = 0  # behind the last delivered record
    # Behind the last record that was on its way when this was saved; `offset` if none was.
    sending_end: int = 0
    run_offset: int = -1  # of the line that started the run; -1 before the first
    num_delivered: int = 0
    num_refused: int = 0  # records that the platform can never take; they stay in the log
    is_ended: bool = False  # whether the platform knows how the last run ended

    @classmethod
    def load(cls, path: Path) -> "Delivery":
        """Load a delivery from a file; without a file, begin at the log's first record."""
        try:
            return cls(**read_json(path))
        except (ValueError, TypeError) as error:
            raise DeliveryFileError(
                f"{path} is damaged ({error}), so that what was delivered is unknown: remove it to send the "
                "whole log again"
            ) from None

    def save(self, path: Path) -> None:
        """Save to `path` atomically, so that a process killed meanwhile leaves the old or the new state."""
        replace_text(path, json.dumps(asdict(self)))


def delivery_path(log: Path, platform: str) -> Path:
    """Return the path of the file with a platform's delivery, in the folder of the log."""
    return log.with_name(f"{platform}.delivered")
