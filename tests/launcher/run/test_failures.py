import json
from collections.abc import Callable
from pathlib import Path

import pytest

from drivetrain_launcher.run.failures import (
    RankFailure,
    announce,
    describe_others,
    describe_root,
    describe_tail,
    find_root,
    format_for_user,
    read_failure,
    record_error,
)


def failure(rank: int, **changes: object) -> RankFailure:
    values = {
        "rank": rank,
        "local_rank": rank,
        "pid": 100 + rank,
        "exit_code": 1,
        "time": float(rank),
        **changes,
    }
    return RankFailure(**values)


BOOM = {"error": "ValueError: boom", "traceback": "Traceback\nValueError: boom\n"}
BROKEN = {"error": "RuntimeError: [gloo] Connection closed by peer", "traceback": "Traceback\n..."}


def test_the_first_is_the_root() -> None:
    assert find_root([failure(3, **BOOM, time=2.0), failure(1, **BOOM, time=3.0)]).rank == 3


def test_a_broken_connection_is_not_the_root_even_if_it_came_first() -> None:
    assert find_root([failure(0, **BROKEN, time=1.0), failure(1, **BOOM, time=2.0)]).rank == 1
    assert find_root([failure(0, **BROKEN, time=1.0), failure(1, exit_code=-9, time=2.0)]).rank == 1


def test_a_rank_that_was_stopped_is_not_the_root() -> None:
    assert find_root([failure(0, exit_code=-15, time=1.0), failure(1, exit_code=3, time=2.0)]).rank == 1


def test_an_os_error_of_the_script_is_no_broken_connection_between_ranks() -> None:
    assert not failure(0, error="OSError: [Errno 111] Connection refused").is_aftermath
    assert failure(0, error="torch.distributed.DistBackendError: NCCL").is_aftermath
    assert failure(0, error="drivetrain_data.errors.DispatchError: rank 1 has ended").is_aftermath


def test_the_traceback_is_shown_with_its_rank() -> None:
    shown = describe_root(failure(2, **BOOM), num_nodes=1)
    assert shown.startswith("drivetrain: rank 2 (local rank 2, process 102) failed:\nTraceback")
    assert shown.count("ValueError: boom") == 1


def test_a_traceback_that_the_scripts_own_hook_showed_is_not_shown_again() -> None:
    shown = describe_root(failure(2, **BOOM, was_shown=True), num_nodes=1)
    assert "Traceback" not in shown
    assert "ValueError: boom; its traceback stands above" in shown


@pytest.mark.parametrize(
    ("exit_code", "words"),
    [
        (-9, "SIGKILL: most likely the system ran out of memory"),
        (-11, "SIGSEGV: a crash in native code"),
        (-7, "SIGBUS: most likely shared memory"),
        (-64, "ended by SIGRTMAX"),
        (124, "ended with exit code 124, its watchdog ended it"),
        (4, "ended with exit code 4, and no exception"),
    ],
)
def test_an_end_without_exception_is_explained(exit_code: int, words: str) -> None:
    assert words in describe_root(failure(0, exit_code=exit_code), num_nodes=1)


def test_the_others_get_a_line_each() -> None:
    root = failure(1, **BOOM)
    others = [
        failure(0, **BROKEN),
        failure(2, exit_code=-15),
        failure(3, exit_code=-9),
        failure(4, exit_code=7),
    ]
    lines = describe_others(root, [root, *others]).splitlines()
    assert lines[1:] == [
        "  rank 0: RuntimeError: [gloo] Connection closed by peer (a connection broke after the first failure)",
        "  rank 2: was stopped by the launcher",
        "  rank 3: was killed (SIGKILL): by the launcher if it did not stop in time, else by the system",
        "  rank 4: exit code 7",
    ]
    assert describe_others(root, [root]) == ""


@pytest.mark.parametrize(("exit_code", "shell"), [(5, 5), (-9, 137), (None, 1)])
def test_the_shell_gets_the_ranks_code(exit_code: int | None, shell: int) -> None:
    assert failure(0, exit_code=exit_code).shell_code == shell


def test_what_is_recorded_is_read_back(tmp_path: Path) -> None:
    file = tmp_path / "error.json"
    try:
        raise KeyError("weights")
    except KeyError as error:
        record_error(file, error, was_shown=True)
    read = read_failure(json.loads(file.read_text()), rank=5, local_rank=1, pid=7, exit_code=1, seen=0.0)
    assert read.error == "KeyError: 'weights'"
    assert 'raise KeyError("weights")' in read.traceback
    assert read.was_shown
    assert read.time > 0


def test_a_rank_that_left_nothing_has_its_exit_code_alone() -> None:
    read = read_failure({"message": "<NONE>"}, rank=0, local_rank=0, pid=1, exit_code=-9, seen=4.0)
    assert (read.error, read.traceback, read.time, read.signal) == ("", "", 4.0, "SIGKILL")


def test_a_rank_that_waited_in_vain_is_told_where_to_look() -> None:
    timed_out = failure(0, error="RuntimeError: Timed out waiting 12000ms for recv", traceback="Traceback\n")
    assert timed_out.is_aftermath
    assert find_root([timed_out, failure(1, exit_code=124, time=9.0)]).rank == 1
    assert "it ended early without an error, or it hangs" in describe_root(timed_out, num_nodes=1)
    assert "one on another node failed first" in describe_root(timed_out, num_nodes=2)


def test_an_exception_is_the_failure_even_if_the_launcher_stopped_the_rank_meanwhile() -> None:
    stopped = failure(0, **BOOM, exit_code=-15)
    assert stopped.shell_code == 1
    assert find_root([stopped, failure(1, exit_code=-15, time=0.0)]).rank == 0
    assert failure(0, exit_code=-15).shell_code == 143


def test_a_wrong_value_is_shown_down_to_the_users_line_and_others_in_full() -> None:
    from drivetrain_state import ParallelDims

    def fails(action: Callable[[], object]) -> str:
        try:
            action()
        except (ValueError, KeyError) as error:
            return format_for_user(error)
        raise AssertionError("nothing failed")

    shown = fails(lambda: ParallelDims(tensor=3).plan(2))
    assert "in <lambda>" in shown
    assert "  (found by drivetrain_state.mesh, line " in shown
    assert "mesh.py" not in shown
    assert shown.splitlines()[-1].startswith("ValueError: ")
    assert fails(lambda: int("x")).splitlines()[-1].startswith("ValueError: invalid literal")
    another = fails(lambda: {}["x"])
    assert "found by" not in another


def test_ranks_that_failed_alike_share_a_line() -> None:
    def failed(rank: int, error: str) -> RankFailure:
        return RankFailure(rank=rank, local_rank=rank, pid=rank, exit_code=1, error=error)

    failures = [
        failed(0, "ValueError: a"),
        failed(1, "ValueError: a"),
        failed(2, "KeyError"),
        failed(3, "ValueError: a"),
    ]
    told = describe_others(failures[0], failures)
    assert told == (
        "drivetrain: the other ranks of this node:\n  ranks 1, 3: the same error\n  rank 2: KeyError\n"
    )
    assert "rank 1: the same error" in describe_others(failures[0], failures[:2])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"error": "ValueError: two\nlines"}, "rank 2 failed: ValueError: two; the other ranks stop now"),
        ({"exit_code": -9}, "rank 2 was ended by SIGKILL; the other"),
        ({"exit_code": 3}, "rank 2 ended with exit code 3; the other"),
    ],
)
def test_a_failure_is_told_at_once_in_one_line(changes: dict[str, object], said: str) -> None:
    line = announce(failure(2, **changes), seconds=30.0)
    assert line.startswith(said)
    assert line.endswith("and have 30 s to save")
    assert "\n" not in line


def test_the_last_lines_are_shown_with_their_rank() -> None:
    assert describe_tail(failure(1), []) == ""
    assert describe_tail(failure(1), ["a"]) == "drivetrain: the last line of rank 1:\n  a\n"
    assert describe_tail(failure(1), ["a", "b"]) == "drivetrain: the last 2 lines of rank 1:\n  a\n  b\n"
