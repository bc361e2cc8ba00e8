"""The effective plan of a run: the requested and the applied value of each setting, and its source.

Applied values are read back from live objects (the DDP wrapper, the device, the policy), so that a setting that was
dropped on the way is detected and raises an error.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from drivetrain_backends import AutoValue
from drivetrain_config import Resolved
from drivetrain_messages import format_table


class PlanMismatchError(RuntimeError):
    """An error for an applied value that differs from the requested one without a reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRow:
    """A setting in the plan.

    Attributes:
        setting: The setting's name, as "section.field".
        asked: The requested value, as resolved.
        applied: The value in force; the requested value if no value can be read back.
        source: The source of the requested value.
        read_back: Whether `applied` was read back from live objects.
        reason: The reason for a different applied value, where the request left the choice open ("auto").
    """

    setting: str
    asked: Any
    applied: Any
    source: str
    read_back: bool = False
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EffectivePlan:
    """The settings of a run, and the facts it runs on.

    Attributes:
        rows: The settings, section by section.
        facts: Short facts other than settings: processes, device, batch sizes, the order of the data.
        details: More about the facts, such as how exactly an order is drawn.
    """

    rows: tuple[PlanRow, ...]
    facts: Mapping[str, Any]
    details: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def as_dict(self) -> dict[str, Any]:
        """Return the plan in plain values, for plan.json, manifests and trackers."""
        rows = {
            row.setting: {k: _plain(v) for k, v in asdict(row).items() if k != "setting"} for row in self.rows
        }
        return {
            "settings": rows,
            "facts": {name: _plain(value) for name, value in self.facts.items()},
            "details": {name: _plain(value) for name, value in self.details.items()},
        }

    def __str__(self) -> str:
        shown = [row for row in self.rows if row.source != "default" or row.asked != row.applied]
        table = [("setting", "asked", "applied", "from")]
        table += [
            (
                r.setting,
                "-" if r.asked is None else _short(r.asked),
                _short(r.applied) if r.read_back else "as asked",
                r.source,
            )
            for r in shown
        ]
        lines = ["effective plan (settings not listed have their defaults)"]
        told = {**self.facts, **{f"{name}, in detail": value for name, value in self.details.items()}}
        lines += [f"  {name}: {_short(value)}" for name, value in told.items()]
        lines.append(format_table(table, indent="  "))
        lines += [f"  {row.setting}: {row.reason}" for row in shown if row.reason and row.asked is not None]
        for row in shown:
            if isinstance(row.applied, Mapping) and row.applied != row.asked:
                written = json.dumps(_plain(row.applied), indent=2).replace("\n", "\n  ")
                lines.append(f"  {row.setting}, as applied: {written}")
        return "\n".join(lines)


def make_plan(
    resolved: Mapping[str, Resolved[Any]],
    applied: Mapping[str, Mapping[str, object]],
    *,
    reasons: Mapping[str, str],
    facts: Mapping[str, Any],
    details: Mapping[str, Any] | None = None,
) -> EffectivePlan:
    """Compare requested values with applied ones, and return the plan.

    Args:
        resolved: The resolved sections by name.
        applied: The values read back from live objects, by section and field; `AutoValue` where the backend made the
            choice. A setting without a value here counts as applied.
        reasons: The reasons why an applied value may differ, by setting ("section.field").
        facts: Short facts other than settings.
        details: More about the facts.

    Returns:
        The effective plan.

    Raises:
        PlanMismatchError: An applied value differs from the requested one without a reason; the message lists all.
    """
    rows = [
        row
        for section, value in resolved.items()
        for row in _rows(section, value, applied.get(section, {}), reasons)
    ]
    odd = [row for row in rows if row.applied != row.asked and not row.reason]
    if odd:
        listed = "; ".join(
            f"{row.setting}: asked {row.asked!r} ({row.source}), applied {row.applied!r}" for row in odd
        )
        raise PlanMismatchError(
            f"applied values differ from the requested ones: {listed}. Request values that can be applied"
        )
    return EffectivePlan(rows=tuple(rows), facts=facts, details=details or {})


def _rows(
    section: str, value: Resolved[Any], applied: Mapping[str, object], reasons: Mapping[str, str]
) -> Iterable[PlanRow]:
    for each in fields(value.value):
        if each.metadata.get("secret"):
            continue
        setting = f"{section}.{each.name}"
        asked = getattr(value.value, each.name)
        source = value.sources[each.name]
        in_force, reason = applied.get(each.name, asked), reasons.get(setting, "")
        if isinstance(in_force, AutoValue):
            in_force, reason = in_force.value, in_force.reason
        yield PlanRow(
            setting=setting,
            asked=asked,
            applied=in_force,
            source=str(source),
            read_back=each.name in applied,
            reason="" if in_force == asked else reason,
        )


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    return str(value)


def _short(value: Any) -> str:
    if isinstance(value, Mapping) and value:
        return "see below"
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."
