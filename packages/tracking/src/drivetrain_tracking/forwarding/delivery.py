"""How far a spool has been delivered to one platform, kept in a file that is replaced whole."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """The state of a delivery.

    Attributes:
        offset: The offset in the spool behind the last delivered record, in bytes.
        num_delivered: The number of records that the platform took.
        num_refused: The number of records that the platform can never take; they stay in the spool.
    """

    offset: int = 0
    num_delivered: int = 0
    num_refused: int = 0

    @classmethod
    def load(cls, path: Path) -> "Delivery":
        """Load a delivery; one that was never saved begins at the spool's first record."""
        try:
            return cls(**json.loads(path.read_text()))
        except FileNotFoundError:
            return cls()

    def save(self, path: Path) -> None:
        """Replace the file, so that a process that is killed leaves the old state or the new one."""
        beside = path.with_suffix(".new")
        with beside.open("w") as file:
            json.dump(asdict(self), file)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)


def delivery_path(spool: Path, platform: str) -> Path:
    """Return the file of a platform's delivery, beside the spool."""
    return spool.with_name(f"{spool.stem}.{platform}.delivered")
