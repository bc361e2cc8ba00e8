import socket
from itertools import permutations

import pytest

from drivetrain_doctor.meeting.reach import answer_connections, judge_reach, reach_all

NAMES = {rank: f"host {rank}" for rank in range(4)}


def ways(count: int = 4, **bad: str) -> dict:  # type: ignore[type-arg]
    plain = dict.fromkeys(permutations(range(count), 2), "yes")
    return plain | {(int(name[1]), int(name[2])): how for name, how in bad.items()}


def whats(found: dict, silent: tuple[int, ...] = ()) -> list[str]:  # type: ignore[type-arg]
    findings = judge_reach(found, silent, NAMES).findings
    assert all(finding.severity == "error" for finding in findings)
    return [finding.what for finding in findings]


def test_open_ways_have_no_finding() -> None:
    report = judge_reach(ways(), (), NAMES)
    assert (report.findings, report.summary) == ([], "12 of 12 connections between hosts work")


def test_a_firewall_in_front_of_one_host_is_one_finding() -> None:
    closed = ways(w02="no answer", w12="no answer", w32="no answer")
    assert whats(closed) == ["no other host can connect to host 2 on an ephemeral port (no answer)"]
    assert "on host 2, allow the other hosts" in judge_reach(closed, (), NAMES).findings[0].repair


@pytest.mark.parametrize(
    ("count", "bad", "what"),
    [
        (4, {"w20": "refused", "w21": "refused", "w23": "refused"},
         "host 2 can connect to no other host, while the others connect to each other"),
        (4, {"w13": "no answer"}, "host 1 cannot connect to host 3 (no answer)"),
        (2, {"w10": "refused"}, "host 1 cannot connect to host 0 (refused)"),
    ],
)  # fmt: skip
def test_a_direction_that_is_closed_is_one_finding(count: int, bad: dict[str, str], what: str) -> None:
    assert whats(ways(count, **bad)) == [what]


def test_a_host_that_fell_silent_is_named_and_its_ways_are_not() -> None:
    silent = {way: how for way, how in ways(w03="frozen", w13="frozen", w23="frozen").items() if way[0] != 3}
    assert whats(silent, (3,)) == ["host 3 joined, and then stopped answering"]


def test_a_listener_answers_whoever_connects() -> None:
    with answer_connections() as port:
        assert reach_all({1: ("127.0.0.1", port), 2: ("127.0.0.1", port)}) == {1: "yes", 2: "yes"}


@pytest.mark.slow
def test_a_closed_port_and_a_frozen_process_differ() -> None:
    with answer_connections() as port:
        pass
    with socket.create_server(("127.0.0.1", 0)) as frozen:  # the kernel accepts, and nobody answers
        assert reach_all({1: ("127.0.0.1", frozen.getsockname()[1]), 2: ("127.0.0.1", port)}) == {
            1: "frozen",
            2: "refused",
        }


def test_nobody_to_reach() -> None:
    assert reach_all({}) == {}
