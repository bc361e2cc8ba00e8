import pytest
import torch

from drivetrain_state import Context, Topology, connect
from drivetrain_state.collectives.collective_errors import on_all_ranks, on_each_rank, on_main
from drivetrain_state.errors import OtherRankFailedError


def results() -> tuple[list[str], int, int]:
    with connect(device="cpu") as context:
        rank = context.topology.rank
        everybody = on_all_ranks(context, lambda: f"from {rank}", doing="the greeting")
        own = on_each_rank(context, lambda: rank, doing="the count")
        return everybody, own, on_main(context, lambda: rank + 7, doing="the count")


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


def test_every_rank_gets_all_results_its_own_or_that_of_the_main_rank(run_ranks) -> None:
    everybody = ["from 0", "from 1"]
    assert run_ranks(results) == [(everybody, 0, 7), (everybody, 1, 7)]


def test_a_rank_that_fails_raises_its_error_and_the_others_tell_it(run_ranks) -> None:
    message = "the save of step 3 was given up on every rank: rank 1 failed with OSError: disk full"
    assert run_ranks(failure_of_rank_one) == [("OtherRankFailedError", message), ("OSError", "disk full")]


def test_alone_it_just_acts() -> None:
    context = Context(topology=Topology(), device=torch.device("cpu"))
    assert on_all_ranks(context, lambda: 3, doing="the count") == [3]
    with pytest.raises(ZeroDivisionError, match="division"):
        on_all_ranks(context, lambda: 1 // 0, doing="the count")
