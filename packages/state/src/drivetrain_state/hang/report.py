"""The diagnosis of a hang from all ranks' answers: suspects, reasons, and a table. Pure functions."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from drivetrain_messages import format_table

_SILENT = "no answer: it was killed or stopped, or a native call holds Python's lock"
_OWN_CODE = "waits for no other rank, while the others wait"
_DIFFER = "waits elsewhere than most: one of the two took another path through the code"
_TIE = "the ranks wait in different places: one of them took another path through the code"
_DIFFERS_BEFORE = (
    "waits in the same line as the others, after other progress: it skipped or added a collective"
)
_TIE_BEFORE = (
    "the ranks wait in the same line, after different progress: one of them skipped or added a collective"
)
_SHOWN_GROUPS = 4

# The file beside torch's error file with the report on a hang that lasts, for the launcher to show at the end.
HANG_NOTE = "hang.txt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The reply of one rank when the watchdog asks for its position: its last progress, and its stack."""

    rank: int
    host: str
    pid: int
    idle_seconds: float  # by the rank's own monotonic clock
    label: str
    where: str
    call: str
    waits: bool  # for another rank or for the device
    stuck: bool  # in a wait for another rank, with a stack that has long been unchanged
    stack: str
    recent: str = ""  # the labels of the last marks, the newest last


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The reporting rank's diagnosis, as published to all ranks."""

    report: str  # the diagnosis, the table and the file of the stacks, as lines
    blocked: bool  # whether some rank is stuck waiting for another
    witness: int  # the rank whose progress means that the run has resumed


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """The ranks that probably block the others, and the reason."""

    ranks: tuple[int, ...]
    reason: str

    def __str__(self) -> str:
        return f"{rank_names(self.ranks)}: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The suspects, the likeliest first, and whether some rank is stuck waiting for another rank."""

    suspects: tuple[Suspect, ...]  # empty if nothing distinguishes one rank
    blocked: bool  # if False, the run may just be slow, and is never ended

    @property
    def ranks(self) -> frozenset[int]:
        """The set of all suspected ranks."""
        return frozenset(rank for suspect in self.suspects for rank in suspect.ranks)

    def __str__(self) -> str:
        if self.suspects:
            return "likely culprit: " + "; ".join(map(str, self.suspects))
        if self.blocked:
            return (
                "every rank waits in the same place: look for a collective before it that the ranks called with "
                "different shapes or in another order, or for a broken network"
            )
        return "no rank is stuck waiting for another, so this may just be slow"


def diagnose(world_size: int, answers: Mapping[int, Answer], departures: Mapping[int, str]) -> Diagnosis:
    """Find the ranks that probably block the others, from the answers and the departures (`"finished"`) by rank."""
    present = {rank: answer for rank, answer in answers.items() if rank not in departures}
    waiting = sorted(rank for rank, answer in present.items() if answer.waits)
    silent = tuple(rank for rank in range(world_size) if rank not in answers and rank not in departures)
    suspects = [Suspect(ranks=silent, reason=_SILENT)] if silent else []
    endings: dict[str, list[int]] = {}
    for rank in sorted(departures):
        if waiting or departures[rank] != "finished":
            endings.setdefault(departures[rank], []).append(rank)
    # Failures first.
    for ending in sorted(endings, key=lambda ending: (ending == "finished", endings[ending])):
        reason = "finished, while the others wait" if ending == "finished" else ending
        suspects.append(Suspect(ranks=tuple(endings[ending]), reason=reason))
    if waiting:
        if busy := tuple(sorted(set(present) - set(waiting))):
            suspects.append(Suspect(ranks=busy, reason=_OWN_CODE))
        if not suspects:
            suspects += _find_apart([present[rank] for rank in waiting])
    return Diagnosis(suspects=tuple(suspects), blocked=any(a.stuck for a in present.values()))


def hang_table(
    world_size: int, answers: Mapping[int, Answer], departures: Mapping[int, str], ranks: Collection[int]
) -> str:
    """Return a table with one row per group of ranks at the same position; suspects come first, marked `>`."""
    groups: dict[tuple[bool, tuple[str, str, str]], list[int]] = {}
    for rank in range(world_size):
        place = ("", "(no answer)", "")
        if rank in departures:
            place = ("", f"({departures[rank].partition(':')[0]})", "")
        elif (answer := answers.get(rank)) is not None:
            place = (answer.label, answer.where, answer.call)
        groups.setdefault((rank not in ranks, place), []).append(rank)
    rows = [("", "rank", "idle", "last progress", "where", "in")]
    for (innocent, place), members in sorted(groups.items(), key=lambda item: (item[0][0], item[1])):
        idle = {round(answers[rank].idle_seconds) for rank in members if rank in answers}
        span = "-".join(map(str, sorted({min(idle), max(idle)}))) + " s" if idle else ""
        rows.append(("" if innocent else ">", compact_ranks(members), span, *place))
    return format_table(rows)


def stacks_text(world_size: int, answers: Mapping[int, Answer], departures: Mapping[int, str]) -> str:
    """Return the full stacks of all ranks as the text of a file."""
    parts: list[str] = []
    for rank in range(world_size):
        if (a := answers.get(rank)) is not None:
            head = f"rank {rank} on {a.host}, process {a.pid}: {a.idle_seconds:.1f} s since {a.label!r}"
            parts.append(f"{head}\n{a.stack}")
        else:
            parts.append(f"rank {rank}: {departures.get(rank, _SILENT)}")
    return "\n\n".join(parts) + "\n"


def rank_names(ranks: Sequence[int]) -> str:
    """Format ranks as `rank 3` or `ranks 0, 2-5`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {compact_ranks(ranks)}"


def compact_ranks(ranks: Sequence[int]) -> str:
    """Format sorted ranks with runs of three or more as ranges: `0, 2-5`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if not runs or runs[-1][-1] != rank - 1:
            runs.append([])
        runs[-1].append(rank)
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)


def _find_apart(waiting: Sequence[Answer]) -> list[Suspect]:
    """Return the ranks that wait elsewhere than the majority, or all ranks if no position has the most ranks."""
    # Ranks at one position may be in different collectives, which their last progress tells, or in the same one after
    # different ones.
    levels: tuple[tuple[Callable[[Answer], str], str, str], ...] = (
        (lambda answer: f"in {answer.call} at {answer.where}", _DIFFER, _TIE),
        (lambda answer: f"in {answer.label!r}", _DIFFERS_BEFORE, _TIE_BEFORE),
        (lambda answer: f"after {answer.recent}", _DIFFERS_BEFORE, _TIE_BEFORE),
    )
    for of, differ, tie in levels:
        groups: dict[str, list[int]] = {}
        for answer in waiting:
            groups.setdefault(of(answer), []).append(answer.rank)
        if len(groups) == 1:
            continue
        (most, members), *others = sorted(groups.items(), key=lambda group: -len(group[1]))
        shown = [f"{rank_names(ranks)} {what}" for what, ranks in [(most, members), *others][:_SHOWN_GROUPS]]
        is_tie = len(others[0][1]) == len(members)
        ranks = [rank for _, group in others for rank in group] + (members if is_tie else [])
        reason = f"{tie if is_tie else differ} ({'; '.join(shown)})"
        return [Suspect(ranks=tuple(sorted(ranks)), reason=reason)]
    return []
