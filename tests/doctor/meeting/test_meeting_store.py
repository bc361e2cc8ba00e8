import socket
import threading
from dataclasses import replace

import pytest

from drivetrain_doctor.checked_run import CheckedRun
from drivetrain_doctor.meeting.clock import answer_hosts, ask_host_0
from drivetrain_doctor.meeting.meeting_store import HostMeeting, MeetingError, join
from processes import free_port


def quiet(_: str) -> None:
    pass


@pytest.fixture
def checked() -> CheckedRun:
    return CheckedRun(
        num_nodes=2, node_rank=0, master_addr="127.0.0.1", master_port=free_port(), wait_seconds=60
    )


@pytest.fixture
def leader(checked: CheckedRun) -> HostMeeting:
    return join(checked, progress=quiet)


@pytest.fixture
def follower(checked: CheckedRun, leader: HostMeeting) -> HostMeeting:
    return join(replace(checked, node_rank=1), progress=quiet)


def test_hosts_tell_host_0_and_it_tells_all(leader: HostMeeting, follower: HostMeeting) -> None:
    assert (leader.rank, follower.rank) == (0, 1)
    follower.post("hello", {"name": "b"})
    leader.post("hello", {"name": "a"})
    assert leader.collect("hello", range(2), seconds=60) == {0: {"name": "a"}, 1: {"name": "b"}}
    leader.tell("roster", [0, 1])
    assert follower.hear("roster", seconds=60) == [0, 1]


def test_those_that_do_not_come_are_missing_after_the_time(leader: HostMeeting) -> None:
    waited: list[list[int]] = []
    assert leader.collect("hello", range(3), seconds=0.2, progress=waited.append) == {}
    assert waited[0] == [0, 1, 2]


def test_a_rank_that_two_hosts_claim_is_seen_by_the_second(
    leader: HostMeeting, follower: HostMeeting
) -> None:
    assert (leader.claim(), follower.claim(), follower.claim()) == (1, 1, 2)


def test_clocks_of_one_machine_agree_within_the_bound(leader: HostMeeting, follower: HostMeeting) -> None:
    answers = threading.Thread(target=answer_hosts, args=(leader, [1]))
    answers.start()
    offset = ask_host_0(follower)
    answers.join(60)
    assert abs(offset.seconds) <= offset.bound_seconds + 1e-3


def test_a_host_that_does_not_ask_for_the_time_holds_nobody_up(leader: HostMeeting) -> None:
    assert not leader.answer_clock(1, 0, seconds=0.1)


def test_ranks_are_given_in_the_order_of_arrival_if_none_is_said(checked: CheckedRun) -> None:
    agreed = replace(checked, node_rank=None, rdzv_backend="c10d")
    meetings = [join(agreed, progress=quiet) for _ in range(3)]
    assert [meeting.rank for meeting in meetings] == [0, 1, 2]


def test_nothing_that_listens(checked: CheckedRun) -> None:
    shown: list[str] = []
    alone = replace(checked, node_rank=1, wait_seconds=0.5)
    with pytest.raises(
        MeetingError, match=r"not reached at 127.0.0.1:\d+ within 0.5 s: the host answers, but nothing"
    ):
        join(alone, progress=shown.append)
    assert shown[0].startswith("waiting for host 0 at 127.0.0.1:")


def test_a_name_that_does_not_resolve(checked: CheckedRun) -> None:
    lost = replace(checked, node_rank=1, master_addr="no-such-host.invalid", wait_seconds=0.5)
    with pytest.raises(MeetingError, match="its name does not resolve; give an address"):
        join(lost, progress=quiet)


def test_another_program_on_the_port(checked: CheckedRun) -> None:
    with socket.create_server(("127.0.0.1", checked.master_port)):
        with pytest.raises(MeetingError, match=r"cannot listen on port \d+ of this host"):
            join(checked, progress=quiet)
        with pytest.raises(MeetingError, match="is no store of torch, or is frozen: most likely another"):
            join(replace(checked, node_rank=1, wait_seconds=1), progress=quiet)


def test_a_leader_that_falls_silent_is_named(leader: HostMeeting, follower: HostMeeting) -> None:
    with pytest.raises(MeetingError, match="host 0 did not answer rank 1 in the step 'roster'"):
        follower.hear("roster", seconds=-14.9)  # a tenth of a second with the grace
