"""A summary of a run's effective plan in about ten lines, printed when training starts."""

from collections.abc import Mapping
from textwrap import wrap
from typing import Any

from drivetrain.plan.effective_plan import EffectivePlan, PlanRow

_WIDTH = 110
_MOST = 4  # choices shown; plan.json has all
_INDENT = 2
_COLUMN = 13
_UNBROKEN = "\u00a0"  # a space at which no line breaks
# Facts that the first lines already show.
_PLACED = ("processes", "device", "backend", "precision")
# Settings whose requested value repeats that of another setting.
_REPEATED = {"state.device": "run.cpu", "data.seed": "run.seed"}
_UNTOLD = ("run.show_plan", "run.verbose")


def summarize(plan: EffectivePlan, *, whole: str) -> str:
    """Return a summary of the run, its requested settings and the choices made, without a final newline.

    Args:
        plan: The effective plan.
        whole: A text that says where to find the whole plan.
    """
    facts = plan.facts
    lines = ["what runs:"]
    lines += _entry("processes", f"{facts['processes']}; device {facts['device']}")
    lines += _entry("training", f"{facts['backend']}, in {facts['precision']}")
    for name, fact in facts.items():
        if name not in _PLACED:
            lines += _entry("data" if name == "data 0" and "data 1" not in facts else name, str(fact))
    asked = {row.setting: row for row in plan.rows if row.source != "default"}
    items = [
        f"{name} = {_format_value(row.asked)} ({row.source})".replace(" ", _UNBROKEN)
        for name, row in asked.items()
        if name not in _UNTOLD and _REPEATED.get(name) not in asked
    ]
    lines += _entry("asked", ", ".join(items) or "nothing: every setting has its default")
    lines += _chosen([row for row in plan.rows if row.reason and row.applied != row.asked])
    return "\n".join([*lines, *_entry("whole plan", whole)])


def _chosen(rows: list[PlanRow]) -> list[str]:
    """Return lines of the values chosen for open settings, with reasons; settings at "auto" come first."""
    rows = sorted(rows, key=lambda row: row.asked is None)
    lines = [
        line
        for row in rows[:_MOST]
        for line in _entry("", f"{row.setting} = {_format_value(row.applied)}: {row.reason}")
    ]
    if len(rows) > _MOST:
        lines += _entry("", f"and {len(rows) - _MOST} more")
    if lines:
        lines[0] = _entry("chosen", lines[0].strip())[0]
    return lines


def _entry(name: str, text: str) -> list[str]:
    """Return the lines of one entry, with its name in a column of its own."""
    head = f"{'':{_INDENT}}{name:<{_COLUMN - 1}} "
    lines = wrap(
        text,
        _WIDTH,
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace(_UNBROKEN, " ") for line in lines]


def _format_value(value: Any) -> str:
    if isinstance(value, Mapping) and value:
        return "see the whole plan"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value)) or "none"
    return str(value)
