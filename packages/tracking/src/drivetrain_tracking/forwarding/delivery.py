"""The state of a delivery: how far a log was sent to one platform, in a file that is replaced whole."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from drivetrain_tracking.errors import DeliveryFileError
from drivetrain_tracking.spool.files import read_json, replace_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """The state of a delivery.

    Attributes:
        offset: The offset in the log behind the last delivered record, in bytes.
        sending_end: The offset behind the last record that was on its way when this was saved; `offset` if none was.
        run_offset: The offset of the line that started the run, or -1 before the first.
        num_refused: The number of records that the platform can never take; they stay in the log.
        is_ended: Whether the platform was told how the last run ended.
    """

    offset: int = 0
    sending_end: int = 0
    run_offset: int = -1
    num_delivered: int = 0
    num_refused: int = 0
    is_ended: bool = False

    @classmethod
    def load(cls, path: Path) -> "Delivery":
        """Load a delivery; one that was never saved begins at the log's first record."""
        try:
            return cls(**read_json(path))
        except (ValueError, TypeError) as error:
            raise DeliveryFileError(
                f"{path} is damaged ({error}), so that nothing tells what was delivered: remove it to send the "
                "whole log again"
            ) from None

    def save(self, path: Path) -> None:
        """Replace the file, so that a process that is killed leaves the old state or the new one."""
        replace_text(path, json.dumps(asdict(self)))


def delivery_path(log: Path, platform: str) -> Path:
    """Return the file of a platform's delivery, beside the log."""
    return log.with_name(f"{platform}.delivered")
