import pytest

from drivetrain_state import ConnectError, GroupRenewal, connect
from drivetrain_state.group_renewal import between_ranks

SEVERED = """
import threading
import torch
import torch.distributed as dist
from drivetrain_state import GroupRenewal, connect, reduce

context = connect(device="cpu")
renewal = GroupRenewal(context)
for number in range(2):  # a renewed group can be severed, too
    if context.topology.rank == 0:  # in a collective that the other rank never enters
        closing = threading.Timer(0.2, renewal.sever, [renewal.rounds()], {"timeout_seconds": 30})
        closing.start()
        try:
            dist.all_reduce(torch.ones(1))
        except RuntimeError:
            print("severed")
        closing.join()
    else:
        renewal.sever(renewal.rounds(), timeout_seconds=30)
    renewal.renew()
    print("sum", reduce(context, torch.tensor(1.0 + number), op="sum").item())
context.close()
"""


def refuses_an_adopted_group() -> None:
    with pytest.raises(ConnectError, match=r"the program created it: let Accelerator\(\) connect the ranks"):
        GroupRenewal(connect(device="cpu"))


def test_a_collective_that_waits_fails_and_the_ranks_form_their_group_again(run_ranks_script) -> None:
    first, second = run_ranks_script(SEVERED)
    assert first.stdout.split() == ["severed", "sum", "2.0", "severed", "sum", "4.0"], first
    assert second.stdout.split() == ["sum", "2.0", "sum", "4.0"], second


def test_a_group_of_the_programs_own_is_refused(run_ranks) -> None:
    run_ranks(refuses_an_adopted_group)


def test_only_connections_whose_other_end_is_a_rank_are_between_ranks() -> None:
    own = {("a:1", "b:2"), ("a:3", "store:4")}
    assert between_ranks(own, {("b:2", "a:1"), ("b:5", "a:3")}) == {("a:1", "b:2")}
