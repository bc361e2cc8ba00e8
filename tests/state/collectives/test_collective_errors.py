import pytest
import torch

from drivetrain_state import Context, Topology, connect
from drivetrain_state.collectives.collective_errors import on_all_ranks, on_each_rank, on_main
from drivetrain_state.errors import OtherRankFailedError


def results_of_two_ranks() -> list[str]:
    with connect(device="cpu") as context:
        return on_all_ranks(context, lambda: f"from {context.topology.rank}", doing="the greeting")


def failure_of_rank_one() -> tuple[str, str]:
    with connect(device="cpu") as context:

        def act() -> None:
            if context.topology.rank == 1:
                raise OSError("disk full")

        try:
            on_all_ranks(context, act, doing="the save of step 3")
        except (OSError, OtherRankFailedError) as error:
            return type(error).__name__, str(error)
    return "none", ""


def test_every_rank_gets_all_results(run_ranks) -> None:
    assert run_ranks(results_of_two_ranks) == [["from 0", "from 1"]] * 2


def test_a_rank_that_fails_raises_its_error_and_the_others_tell_it(run_ranks) -> None:
    message = "the save of step 3 was given up on every rank: rank 1 failed with OSError: disk full"
    assert run_ranks(failure_of_rank_one) == [("OtherRankFailedError", message), ("OSError", "disk full")]


def what_each_keeps_and_what_the_main_rank_tells() -> tuple[int, int]:
    with connect(device="cpu") as context:
        rank = context.topology.rank
        return on_each_rank(context, lambda: rank, doing="the count"), on_main(
            context, lambda: rank + 7, doing="the count"
        )


def test_a_result_stays_or_comes_from_the_main_rank(run_ranks) -> None:
    assert run_ranks(what_each_keeps_and_what_the_main_rank_tells) == [(0, 7), (1, 7)]


def test_alone_it_just_acts() -> None:
    context = Context(topology=Topology(), device=torch.device("cpu"))
    assert on_all_ranks(context, lambda: 3, doing="the count") == [3]
    with pytest.raises(ZeroDivisionError, match="division"):
        on_all_ranks(context, lambda: 1 // 0, doing="the count")
