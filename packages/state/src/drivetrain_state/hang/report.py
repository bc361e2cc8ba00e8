"""What a hang looks like from all ranks at once: who holds the others up, why, and the table that says so. Pure."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

_SILENT = "no answer: it was killed or stopped, or a native call holds Python's lock"
_OWN_CODE = "waits for no other rank, while the others wait"
_DIFFER = "waits elsewhere than most: one of the two took another path through the code"
_TIE = "the ranks wait in different places: one of them took another path through the code"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What one rank says when it is asked where it is.

    Attributes:
        rank: Who answers.
        host: The name of its host.
        pid: Its process on that host.
        idle_seconds: Seconds since its last progress, by its own monotonic clock.
        label: What that progress was.
        where: The user's innermost code, as `file:line function`.
        call: What that code is in.
        waits: Whether `call` only ends when another rank or the device does its part.
        stuck: Whether it waits for another rank, and has stood in the very same place for long.
        stack: The whole Python stack of the thread that makes progress.
    """

    rank: int
    host: str
    pid: int
    idle_seconds: float
    label: str
    where: str
    call: str
    waits: bool
    stuck: bool
    stack: str

    def to_json(self) -> str:
        """The text that travels through the store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> "Answer":
        """The answer that `to_json` wrote."""
        return cls(**json.loads(text))


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """Ranks that probably hold the others up, and why."""

    ranks: tuple[int, ...]
    reason: str

    def __str__(self) -> str:
        return f"{rank_names(self.ranks)}: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What the answers of all ranks say together.

    Attributes:
        suspects: The likeliest culprits first; empty where nothing sets one rank apart.
        blocked: Whether some rank is stuck waiting for another. Where none is, the run may only be slow, and is
            never ended for it.
    """

    suspects: tuple[Suspect, ...]
    blocked: bool

    @property
    def ranks(self) -> frozenset[int]:
        """Every suspected rank."""
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
    """Name the ranks that probably hold the others up.

    Args:
        world_size: Number of ranks.
        answers: What the ranks said that answered.
        departures: How the ranks ended that said goodbye, such as `"finished"`.
    """
    present = {rank: answer for rank, answer in answers.items() if rank not in departures}
    waiting = sorted(rank for rank, answer in present.items() if answer.waits)
    silent = tuple(rank for rank in range(world_size) if rank not in answers and rank not in departures)
    suspects = [Suspect(ranks=silent, reason=_SILENT)] if silent else []
    suspects += _departed({r: how for r, how in departures.items() if waiting or how != "finished"})
    if waiting:
        busy = tuple(sorted(set(present) - set(waiting)))
        if busy:
            suspects.append(Suspect(ranks=busy, reason=_OWN_CODE))
        if not suspects:
            suspects += _apart([present[rank] for rank in waiting])
    return Diagnosis(suspects=tuple(suspects), blocked=any(a.stuck for a in present.values()))


def hang_table(
    world_size: int, answers: Mapping[int, Answer], departures: Mapping[int, str], ranks: Iterable[int]
) -> str:
    """One row for each group of ranks that stand in the same place, the suspected `ranks` first and marked `>`."""
    marked = frozenset(ranks)
    groups: dict[tuple[bool, tuple[str, str, str]], list[int]] = {}
    for rank in range(world_size):
        groups.setdefault((rank not in marked, _row(rank, answers, departures)), []).append(rank)
    rows = [("", "rank", "idle", "last progress", "where", "in")]
    for (innocent, (label, where, call)), members in sorted(
        groups.items(), key=lambda item: (item[0][0], item[1])
    ):
        idle = _span([answers[rank].idle_seconds for rank in members if rank in answers])
        rows.append(("" if innocent else ">", compact_ranks(members), idle, label, where, call))
    widths = [max(len(row[column]) for row in rows) for column in range(6)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def stacks_text(world_size: int, answers: Mapping[int, Answer], departures: Mapping[int, str]) -> str:
    """Every rank's whole stack, for a file."""
    parts: list[str] = []
    for rank in range(world_size):
        if rank in answers:
            a = answers[rank]
            head = f"rank {rank} on {a.host}, process {a.pid}: {a.idle_seconds:.1f} s since {a.label!r}"
            parts.append(f"{head}\n{a.stack}")
        else:
            parts.append(f"rank {rank}: {departures.get(rank, _SILENT)}")
    return "\n\n".join(parts) + "\n"


def rank_names(ranks: Sequence[int]) -> str:
    """`rank 3` or `ranks 0, 2-5`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {compact_ranks(ranks)}"


def compact_ranks(ranks: Sequence[int]) -> str:
    """Sorted ranks with runs of three and more drawn together: `0, 2-5`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)


def _departed(departures: Mapping[int, str]) -> list[Suspect]:
    """One suspect for each way in which ranks have ended, those that failed first."""
    by_ending: dict[str, list[int]] = {}
    for rank in sorted(departures):
        by_ending.setdefault(departures[rank], []).append(rank)
    endings = sorted(by_ending, key=lambda ending: (ending == "finished", by_ending[ending]))
    return [
        Suspect(
            ranks=tuple(by_ending[ending]),
            reason=f"{ending}, while the others wait" if ending == "finished" else ending,
        )
        for ending in endings
    ]


def _apart(waiting: Sequence[Answer]) -> list[Suspect]:
    """The ranks that wait elsewhere than most; all of them where there is no such thing as most."""
    places = Counter((answer.where, answer.call) for answer in waiting)
    (most, count), *others = places.most_common()
    if not others:
        return []
    if others[0][1] == count:
        return [Suspect(ranks=tuple(answer.rank for answer in waiting), reason=_TIE)]
    apart = tuple(answer.rank for answer in waiting if (answer.where, answer.call) != most)
    return [Suspect(ranks=apart, reason=_DIFFER)]


def _row(rank: int, answers: Mapping[int, Answer], departures: Mapping[int, str]) -> tuple[str, str, str]:
    if rank in departures:
        return "", f"({departures[rank].partition(':')[0]})", ""
    if rank not in answers:
        return "", "(no answer)", ""
    answer = answers[rank]
    return answer.label, answer.where, answer.call


def _span(seconds: Sequence[float]) -> str:
    """`61 s`, or `61-63 s` where the ranks of a row differ."""
    if not seconds:
        return ""
    low, high = round(min(seconds)), round(max(seconds))
    return f"{low} s" if low == high else f"{low}-{high} s"
