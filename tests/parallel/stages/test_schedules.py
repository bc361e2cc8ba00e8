"""Every order does each part of the work once, and never waits for ever."""

from collections import Counter

import pytest

from drivetrain_parallel.errors import ParallelPlanError
from drivetrain_parallel.stages.schedules import (
    SCHEDULES,
    Action,
    Kind,
    bubble,
    find_schedule,
    plan_order,
    simulate,
)

SECONDS: dict[Kind, float] = {"forward": 1.0, "backward": 2.0, "input": 1.0, "weight": 1.0}


@pytest.mark.parametrize("num_pieces", [1, 2, 3, 4, 7, 8, 16])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.default_cases("2-1", "2-4", "3-7", "4-8")
def test_each_stage_runs_each_piece_once(name: str, num_ranks: int, num_pieces: int) -> None:
    schedule = SCHEDULES[name]
    ranks = schedule.ranks(num_ranks)
    order = plan_order(schedule, num_ranks, num_pieces)
    done = Counter((a.stage, a.piece, a.kind) for one in order for a in one)
    assert set(done.values()) == {1}
    for stage in range(len(ranks)):
        for piece in range(num_pieces):
            kinds = {kind for kind in SECONDS if (stage, piece, kind) in done}
            assert kinds in ({"forward", "backward"}, {"forward", "input", "weight"})
    assert all(ranks[action.stage] == rank for rank, one in enumerate(order) for action in one)
    times = simulate(order, len(ranks), SECONDS)  # which raises if ranks wait for each other for ever
    assert 0 <= bubble(times) < 1


def test_more_pieces_make_a_smaller_bubble_and_interleaving_a_smaller_one_still() -> None:
    def share(name: str, num_pieces: int) -> float:
        schedule = SCHEDULES[name]
        per_stage: dict[Kind, float] = {
            kind: seconds / schedule.stages_per_rank for kind, seconds in SECONDS.items()
        }
        order = plan_order(schedule, 4, num_pieces)
        return bubble(simulate(order, 4 * schedule.stages_per_rank, per_stage))

    assert share("1f1b", 4) == pytest.approx(3 / 7)
    assert share("1f1b", 16) == pytest.approx(3 / 19) == share("gpipe", 16)
    assert share("zbv", 16) < share("interleaved_1f1b", 16) < share("1f1b", 16)


def test_an_order_that_cannot_run_is_refused() -> None:
    first = (Action("backward", 0, 0), Action("forward", 0, 0))
    with pytest.raises(ParallelPlanError, match="wait for each other"):
        simulate((first, (Action("forward", 1, 0), Action("backward", 1, 0))), 2, SECONDS)


def test_an_unknown_name_lists_those_there_are() -> None:
    with pytest.raises(ParallelPlanError, match="'2f2b' is none of gpipe, 1f1b, interleaved_1f1b"):
        find_schedule("2f2b")
