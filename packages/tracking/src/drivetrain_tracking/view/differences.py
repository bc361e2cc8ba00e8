"""Compare what two runs were started with, name by name. Pure."""

import json
from collections.abc import Mapping
from dataclasses import dataclass

from drivetrain_tracking.plain import Plain
from drivetrain_tracking.records import flat_values


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedValue:
    """A named value in two runs.

    Attributes:
        name: The name; nested names are joined by slashes.
        first: The value in the first run as JSON; None where the run has none of this name.
        second: The value in the second run.
    """

    name: str
    first: str | None
    second: str | None

    @property
    def is_different(self) -> bool:
        """True if the runs differ here: 1 and 1.0 do, for they are written differently."""
        return self.first != self.second


def compare_values(first: Mapping[str, Plain], second: Mapping[str, Plain]) -> tuple[ComparedValue, ...]:
    """Compare nested values; the names are those of the first run in its order, then others of the second."""
    left, right = _as_text(first), _as_text(second)
    return tuple(
        ComparedValue(name=name, first=left.get(name), second=right.get(name))
        for name in dict.fromkeys([*left, *right])
    )


def _as_text(values: Mapping[str, Plain]) -> dict[str, str]:
    return {name: json.dumps(value, ensure_ascii=False) for name, value in flat_values(values).items()}
