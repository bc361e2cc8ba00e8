"""Format ages and tables for a terminal."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from math import isfinite

from drivetrain_messages import format_table

_AGES = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def age_text(saved_at: str, now: datetime) -> str:
    """Format the time since a manifest's `saved_at` in its largest unit: "3 h"."""
    seconds = max(0, int((now - datetime.fromisoformat(saved_at)).total_seconds()))
    length, unit = next(((length, unit) for length, unit in _AGES if seconds >= length), _AGES[-1])
    return f"{seconds // length} {unit}"


def time_text(saved_at: str) -> str:
    """Format a manifest's `saved_at` for people: "2026-01-31 12:00:00 UTC"."""
    return f"{datetime.fromisoformat(saved_at):%Y-%m-%d %H:%M:%S %Z}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a table with one line per row and columns as wide as needed; it ends with a line break."""
    return format_table([[name.upper() for name in header], *rows]) + "\n"


def metrics_as_json(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """Return metrics for JSON, which has no infinity and no NaN: they become null."""
    return {name: value if isfinite(value) else None for name, value in metrics.items()}
