"""The order in which ranks run the forwards and backwards of their stages, and its simulation. Pure.

The orders with several stages a rank are those of `torch.distributed.pipelining`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple, TypeAlias

from drivetrain_parallel.errors import ParallelPlanError
from drivetrain_parallel.stages.compat import pipeline_order

Kind = Literal["forward", "backward", "input", "weight"]


class Action(NamedTuple):
    """A part of the work of a stage on a piece of the batch.

    A backward may come in two parts: the gradient of the stage's input, then those of its weights.
    """

    kind: Kind
    stage: int
    piece: int


Order: TypeAlias = tuple[tuple[Action, ...], ...]  # of each rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A kind of order.

    Attributes:
        name: The name of the kind.
        stages_per_rank: The number of stages that a rank holds.
        is_v: Whether the ranks hold their second stages in reverse, so that the first rank also holds the last stage.
        splits_backward: Whether backwards come in two parts.
        torch_name: The name of torch's class, of orders that are torch's.
    """

    name: str
    stages_per_rank: int = 1
    is_v: bool = False
    splits_backward: bool = False
    torch_name: str | None = None

    def ranks(self, num_ranks: int) -> tuple[int, ...]:
        """Return the rank of each stage.

        Example:
            >>> SCHEDULES["zbv"].ranks(2)
            (0, 1, 1, 0)
        """
        once = tuple(range(num_ranks))
        return once + once[::-1] if self.is_v else once * self.stages_per_rank


_TORCH = (
    Schedule(name="interleaved_1f1b", stages_per_rank=2, torch_name="ScheduleInterleaved1F1B"),
    Schedule(name="looped_bfs", stages_per_rank=2, torch_name="ScheduleLoopedBFS"),
    Schedule(name="interleaved_zero_bubble", stages_per_rank=2, splits_backward=True,
             torch_name="ScheduleInterleavedZeroBubble"),
    Schedule(name="zbv", stages_per_rank=2, is_v=True, splits_backward=True, torch_name="ScheduleZBVZeroBubble"),
    Schedule(name="dual_pipe_v", stages_per_rank=2, is_v=True, splits_backward=True, torch_name="ScheduleDualPipeV"),
)  # fmt: skip
SCHEDULES: Mapping[str, Schedule] = {
    one.name: one for one in (Schedule(name="gpipe"), Schedule(name="1f1b"), *_TORCH)
}


def find_schedule(name: str) -> Schedule:
    """Return a schedule by its name.

    Raises:
        ParallelPlanError: There is none of that name.
    """
    if name not in SCHEDULES:
        raise ParallelPlanError(f"parallel.pipeline_schedule={name!r} is none of {', '.join(SCHEDULES)}")
    return SCHEDULES[name]


@lru_cache(maxsize=64)
def plan_order(schedule: Schedule, num_ranks: int, num_pieces: int) -> Order:
    """Return what each rank does, in order. A schedule that cannot have so few pieces runs all forwards first.

    Example:
        >>> [f"{a.kind[0]}{a.piece}" for a in plan_order(SCHEDULES["1f1b"], 2, 3)[0]]
        ['f0', 'f1', 'b0', 'f2', 'b1', 'b2']
    """
    if schedule.torch_name is not None:
        try:
            order = pipeline_order(schedule.torch_name, num_ranks, schedule.ranks(num_ranks), num_pieces)
        except ValueError:  # too few pieces, or a number that it does not divide
            return _all_forwards_first(schedule, num_ranks, num_pieces)
        return tuple(tuple(Action(*each) for each in order[rank]) for rank in range(num_ranks))
    if schedule.name == "gpipe":
        return _all_forwards_first(schedule, num_ranks, num_pieces)
    return tuple(_one_forward_one_backward(rank, num_ranks, num_pieces) for rank in range(num_ranks))


def _all_forwards_first(schedule: Schedule, num_ranks: int, num_pieces: int) -> Order:
    ranks = schedule.ranks(num_ranks)
    held = [[stage for stage, rank in enumerate(ranks) if rank == each] for each in range(num_ranks)]
    pieces = range(num_pieces)
    return tuple(
        (
            *(Action("forward", stage, piece) for stage in stages for piece in pieces),
            *(Action("backward", stage, piece) for stage in reversed(stages) for piece in pieces),
        )
        for stages in held
    )


def _one_forward_one_backward(stage: int, num_stages: int, num_pieces: int) -> tuple[Action, ...]:
    ahead = min(num_pieces, num_stages - stage)
    found = [Action("forward", stage, piece) for piece in range(ahead)]
    for piece in range(num_pieces):
        found.append(Action("backward", stage, piece))
        if ahead + piece < num_pieces:
            found.append(Action("forward", stage, ahead + piece))
    return tuple(found)


class Timed(NamedTuple):
    """An action with its start and its end."""

    action: Action
    start: float
    end: float


def simulate(
    order: Order, num_stages: int, seconds: Mapping[Kind, float], *, transfer: float = 0.0
) -> tuple[tuple[Timed, ...], ...]:
    """Return when each rank does what, if it waits for what other stages send alone.

    Args:
        order: The order of each rank.
        num_stages: The number of stages.
        seconds: The time of each kind of action, the same for all stages.
        transfer: The time until what one stage sends has come to the next.

    Raises:
        ParallelPlanError: The ranks would wait for each other for ever.
    """
    ends: dict[Action, float] = {}
    times: list[list[Timed]] = [[] for _ in order]
    at, now = [0] * len(order), [0.0] * len(order)
    ready: float | None
    while any(place < len(actions) for place, actions in zip(at, order, strict=True)):
        has_moved = False
        for rank, actions in enumerate(order):
            while at[rank] < len(actions):
                action = actions[at[rank]]
                needed = _needed(action, num_stages)
                if any(all(one not in ends for one in each) for each in needed):
                    break
                ready = max(
                    (ends[one] + transfer for each in needed for one in each if one in ends), default=0.0
                )
                start = max(now[rank], ready)
                now[rank] = ends[action] = start + seconds[action.kind]
                times[rank].append(Timed(action, start, now[rank]))
                at[rank] += 1
                has_moved = True
        if not has_moved:
            raise ParallelPlanError("ranks of this order wait for each other for ever")
    return tuple(map(tuple, times))


def _needed(action: Action, num_stages: int) -> list[tuple[Action, ...]]:
    """Return what must have ended before an action: one of each tuple."""
    kind, stage, piece = action
    if kind == "forward":
        return [(Action("forward", stage - 1, piece),)] if stage else []
    if kind == "weight":
        return [(Action("input", stage, piece),)]
    if stage == num_stages - 1:
        return [(Action("forward", stage, piece),)]
    return [(Action("backward", stage + 1, piece), Action("input", stage + 1, piece))]


def bubble(times: Sequence[Sequence[Timed]]) -> float:
    """Return the share of the ranks' time in which they wait.

    Example:
        >>> order = plan_order(SCHEDULES["gpipe"], 2, 2)
        >>> round(bubble(simulate(order, 2, {"forward": 1, "backward": 2})), 3)
        0.333
    """
    total = max(one.end for each in times for one in each)
    busy = sum(one.end - one.start for each in times for one in each)
    return 1 - busy / (total * len(times))
