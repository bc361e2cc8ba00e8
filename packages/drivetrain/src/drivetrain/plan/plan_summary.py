"""A summary of a run's effective plan in five lines, printed when training starts."""

from collections.abc import Mapping
from textwrap import wrap
from typing import Any

from drivetrain.plan.effective_plan import EffectivePlan

_WIDTH = 110
_MOST = 3  # choices shown; plan.json has all
_COLUMN = 9
_CHANGES = ("model.activation_checkpointing", "model.compile")
# Facts of how the model is divided, and of what was chosen for it beside settings.
_DIVIDED, _CHOSEN = ("layers", "sequences", "fp8 layers"), ("plan",)


def summarize(plan: EffectivePlan, *, whole: str) -> str:
    """Return what trains where, the batch of a step, what is kept, and the choices made, without a final newline.

    Args:
        plan: The effective plan.
        whole: A text that says where to find the whole plan.
    """
    facts = {name: str(fact) for name, fact in plan.facts.items()}
    by_name = {row.setting: row for row in plan.rows}
    divided = [f"{name} {facts[name]}" for name in _DIVIDED if name in facts]
    changed = [f"{name}={by_name[name].applied}" for name in _CHANGES if name in by_name]
    trains = [
        f"{facts['processes']}, {facts['device']}: {facts['backend']} in {facts['precision']}",
        *divided,
        *(text for text in changed if not text.endswith("=none")),
    ]
    lines = _entry("trains", "; ".join(trains))
    if (batch := _trained_batch(facts)) is not None:
        lines += _entry("a step", batch)
    folder = by_name["run.project_dir"].applied if "run.project_dir" in by_name else None
    logged = f", logged to {facts['trackers']}" if "trackers" in facts else ""
    lines += _entry(
        "kept", f"in {folder}{logged}" if folder else f"nothing: run.project_dir is not set{logged}"
    )
    rows = sorted(
        (row for row in plan.rows if row.reason and row.applied != row.asked), key=lambda r: r.asked is None
    )
    # The seed stands beside the batch, where it matters.
    rows = [row for row in rows if row.setting != "data.seed"]
    chosen = [facts[name] for name in _CHOSEN if name in facts]
    chosen += [f"{row.setting} = {_format_value(row.applied)}: {row.reason}" for row in rows]
    more = [f"{len(chosen) - _MOST} more"] if len(chosen) > _MOST else []
    lines += _entry("chosen", "; ".join([*chosen[:_MOST], *more])) if chosen else []
    return "\n".join([*lines, *_entry("more", whole)])


def _trained_batch(facts: Mapping[str, str]) -> str | None:
    """Return the description of the first loader that shuffles, or else of the first; None without loaders."""
    loaders = [fact for name, fact in facts.items() if name.startswith("data ")]
    return next((fact for fact in loaders if "shuffled" in fact), loaders[0] if loaders else None)


def _entry(name: str, text: str) -> list[str]:
    """Return the lines of one entry, with its name in a column of its own."""
    head = f"{name:<{_COLUMN - 1}} "
    return wrap(
        text,
        _WIDTH,
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _format_value(value: Any) -> str:
    if isinstance(value, Mapping) and value:
        return "see the whole plan"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value)) or "none"
    return str(value)
