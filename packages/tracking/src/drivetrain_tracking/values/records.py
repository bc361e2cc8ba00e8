"""The records of a run's log, in the frozen form that a platform receives."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from drivetrain_tracking.values.plain import Plain

MediaKind: TypeAlias = Literal["image", "audio", "video", "table", "histogram", "text", "figure", "artifact"]
ALL_MEDIA: frozenset[MediaKind] = frozenset(get_args(MediaKind))


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredMedium:
    """A medium of a record: its content is a file beside the log, or plain data for tables, histograms and texts.

    Attributes:
        kind: The kind of medium.
        path: The file; None if `data` holds the content. Images and figures are PNG, audio is WAV.
        data: A table's `{"columns": [...], "rows": [[...], ...]}`, a histogram's
            `{"edges": [n + 1 numbers], "counts": [n numbers]}`, a text's string; None for files.
        caption: A line of text to show with the medium.
    """

    kind: MediaKind
    path: Path | None = None
    data: Plain = None
    caption: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedRecord:
    """The record of one `log` call.

    Attributes:
        time: The time of the `log` call, in seconds since the epoch.
        step: The optimizer step, if one was given.
        attempt: 1, plus 1 each time that a resumed run repeats steps; a platform keeps attempts apart.
        values: Plain values by name, as they were logged; `flat_values` flattens them.
        media: Media by name.
    """

    time: float
    step: int | None = None
    attempt: int = 1
    values: Mapping[str, Plain] = field(default_factory=dict[str, Plain])
    media: Mapping[str, StoredMedium] = field(default_factory=dict[str, StoredMedium])

    @property
    def numbers(self) -> dict[str, float]:
        """The numbers among the values, as one level; true and false are 1 and 0."""
        values = flat_values(self.values)
        return {name: float(value) for name, value in values.items() if isinstance(value, (int, float))}

    @property
    def texts(self) -> dict[str, str]:
        """The strings among the values, as one level."""
        return {name: value for name, value in flat_values(self.values).items() if isinstance(value, str)}

    @property
    def attempt_prefix(self) -> str:
        """The prefix of names on a platform that keeps attempts apart by name; empty for the first attempt."""
        return "" if self.attempt == 1 else f"attempt-{self.attempt}/"


def count_first_held(records: Sequence[LoggedRecord], held_times: Collection[float]) -> int:
    """Return how many records, counted from the first, have times that a platform holds."""
    return next((n for n, record in enumerate(records) if record.time not in held_times), len(records))


def flat_values(values: Mapping[str, Plain]) -> dict[str, str | int | float | bool | None]:
    """Return nested values as one level: `{"lr": {"head": 0.1}}` becomes `{"lr/head": 0.1}`, lists by index."""
    return {"/".join(path): value for path, value in flat_leaves(values)}


def flat_leaves(values: Mapping[str, Plain]) -> list[tuple[tuple[str, ...], str | int | float | bool | None]]:
    """Return each nested value with the names on the path to it, in order."""
    leaves: list[tuple[tuple[str, ...], str | int | float | bool | None]] = []
    pending: list[tuple[tuple[str, ...], Plain]] = [((name,), value) for name, value in values.items()][::-1]
    while pending:
        path, value = pending.pop()
        if isinstance(value, Mapping):
            pending += [((*path, key), item) for key, item in value.items()][::-1]
        elif isinstance(value, list):
            pending += [((*path, str(index)), item) for index, item in enumerate(value)][::-1]
        else:
            leaves.append((path, value))
    return leaves
