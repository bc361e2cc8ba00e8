"""Settings that someone has said, in any place, and that nothing reads in this run."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from drivetrain_config import Resolved
from drivetrain_precision.policy import unused_settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Unread:
    """Settings of a section that nothing reads, for one reason.

    Attributes:
        section: The name of their section.
        said: The fields, each with its value and source.
        why: The reason, and what would use them.
    """

    section: str
    said: Mapping[str, str]
    why: str

    @property
    def names(self) -> list[str]:
        """The settings, as "section.field"."""
        return [f"{self.section}.{field}" for field in self.said]

    def __str__(self) -> str:
        return f"{self.section}: {', '.join(self.said.values())} has no effect, {self.why}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Need:
    """A condition on which settings have an effect."""

    section: str
    fields: Collection[str]
    is_met: Callable[[Any], bool]
    why: str


_NEEDS = (
    _Need(
        section="tracking",
        fields=("token_field", "flops_per_step", "peak_flops"),
        is_met=lambda tracking: tracking.measures_throughput,
        why="since nothing measures the throughput; tracking.throughput=True does",
    ),
    _Need(
        section="state",
        fields=("hang_timeout_seconds", "hang_report_directory"),
        is_met=lambda state: state.watchdog,
        why="since state.watchdog is off",
    ),
    _Need(
        section="checkpoint",
        fields=("best_mode",),
        is_met=lambda checkpoint: checkpoint.best_metric is not None,
        why="since no checkpoint.best_metric is named",
    ),
    _Need(
        section="data",
        fields=("read_ahead",),
        is_met=lambda data: data.dispatch is not False,
        why="since data.dispatch is off, and each rank reads for itself",
    ),
)
_OF_TRACKERS = _Need(
    section="tracking",
    fields=("on_error", "flush_seconds", "drain_seconds", "record_info"),
    is_met=lambda _: False,
    why="since the run has no tracker; run.log_with names one",
)


def find_unread(
    resolved: Mapping[str, Resolved[Any]],
    others: Mapping[str, Resolved[Any]],
    *,
    backends: Collection[str],
    backend: str,
    mode: str,
    has_trackers: bool,
) -> list[Unread]:
    """Return the settings that were said and that nothing reads.

    Args:
        resolved: The sections that the run reads, by name.
        others: All other sections that something is said of.
        backends: The names of all backends, which their sections have too.
        backend: The name of the class of the backend that trains.
        mode: The precision of the run.
        has_trackers: Whether the run logs to any tracker.
    """
    found: list[Unread] = []
    for section, other in others.items():
        why = "since it is no part of this program; the command that has it reads flags, environment and file"
        if section in backends:
            why = f"since this run uses {backend}; backend={section!r} or --backend {section} uses it"
        found.append(Unread(section=section, said=_said(other, None), why=why))
    for need in _NEEDS if has_trackers else (*_NEEDS, _OF_TRACKERS):
        if not need.is_met(resolved[need.section].value):
            said = _said(resolved[need.section], need.fields)
            found.append(Unread(section=need.section, said=said, why=need.why))
    for field, other_mode in unused_settings(mode, resolved["precision"].value).items():
        said = _said(resolved["precision"], [field])
        why = f"with mixed_precision={mode!r}: it is for {other_mode!r}"
        found.append(Unread(section="precision", said=said, why=why))
    return [each for each in found if each.said]


def tell_unsaved(checkpoint: Resolved[Any], *, has_saved: bool, was_asked: bool) -> Iterable[Unread]:
    """Return the settings of checkpoints that had no effect in a run.

    Args:
        checkpoint: The `checkpoint` section.
        has_saved: Whether the run has saved.
        was_asked: Whether the program has called `save_if_due`.
    """
    if not was_asked:
        said = _said(checkpoint, ("save_every_steps", "save_every_minutes", "save_on_signals"))
        yield Unread(section="checkpoint", said=said, why="since the program never called save_if_due()")
    if not has_saved:
        said = _said(checkpoint, ("keep_last", "keep_every", "keep_best", "background", "staging"))
        yield Unread(section="checkpoint", said=said, why="since the run saved no checkpoint")


def _said(section: Resolved[Any], names: Collection[str] | None) -> dict[str, str]:
    """Return the fields, of some or all, that any source says, each with its value and source."""
    found: dict[str, str] = {}
    for each in fields(section.value):
        source = section.sources[each.name]
        if source.kind != "default" and (names is None or each.name in names):
            value = "***" if each.metadata.get("secret") else repr(getattr(section.value, each.name))
            found[each.name] = f"{each.name}={value} ({source})"
    return found
