import json
import re
from collections.abc import Callable
from concurrent.futures import Future
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
from drivetrain_memory import MemoryTracker
from drivetrain_state import ParallelDims


def failure(rank: int, **changes: object) -> RankFailure:
    values = {"rank": rank, "local_rank": rank, "pid": 100 + rank, "exit_code": 1, "time": float(rank)}
    return RankFailure(**{**values, **changes})


BOOM = {"error": "ValueError: boom", "traceback": "Traceback\nValueError: boom\n"}
BROKEN = {"error": "RuntimeError: [gloo] Connection closed by peer", "traceback": "Traceback\n..."}
TIMED_OUT = {"error": "RuntimeError: Timed out waiting 12000ms for recv", "traceback": "Traceback\n"}


@pytest.mark.parametrize(
    ("failures", "root"),
    [
        ([failure(3, **BOOM, time=2.0), failure(1, **BOOM, time=3.0)], 3),
        ([failure(0, **BROKEN), failure(1, **BOOM)], 1),
        ([failure(0, **BROKEN), failure(1, exit_code=-9)], 1),
        ([failure(0, **TIMED_OUT), failure(1, exit_code=124, time=9.0)], 1),
        ([failure(0, exit_code=-15), failure(1, exit_code=3)], 1),
        ([failure(0, **BOOM, exit_code=-15, time=9.0), failure(1, exit_code=-15)], 0),
    ],
    ids=["first", "before broken", "killed", "timed out", "before stopped", "exception of one stopped"],
)
def test_the_root_is_the_first_that_is_no_consequence(failures: list[RankFailure], root: int) -> None:
    assert find_root(failures).rank == root


@pytest.mark.parametrize(
    ("error", "is_aftermath"),
    [
        ("OSError: [Errno 111] Connection refused", False),  # of the script
        ("torch.distributed.DistBackendError: NCCL", True),
        ("drivetrain_data.errors.DispatchError: rank 1 has ended", True),
        (TIMED_OUT["error"], True),
    ],
)
def test_a_broken_connection_between_ranks_is_an_aftermath(error: str, is_aftermath: bool) -> None:
    assert failure(0, error=error).is_aftermath == is_aftermath


def test_the_traceback_is_shown_with_its_rank_unless_the_scripts_own_hook_showed_it() -> None:
    shown = describe_root(failure(2, **BOOM), num_nodes=1)
    assert shown.startswith("drivetrain: rank 2 (local rank 2, process 102) failed:\nTraceback")
    assert shown.count("ValueError: boom") == 1
    shown = describe_root(failure(2, **BOOM, was_shown=True), num_nodes=1)
    assert "Traceback" not in shown
    assert "ValueError: boom; its traceback stands above" in shown


@pytest.mark.parametrize(
    ("changes", "num_nodes", "words"),
    [
        (
            {"exit_code": -9},
            1,
            "SIGKILL: by another process or user, or by the kernel for lack of memory where that",
        ),
        ({"exit_code": -11}, 1, "SIGSEGV: a crash in native code"),
        ({"exit_code": -7}, 1, "SIGBUS: most likely shared memory"),
        ({"exit_code": -64}, 1, "ended by SIGRTMAX"),
        ({"exit_code": 124}, 1, "ended with exit code 124, its watchdog ended it\n"),
        ({"exit_code": 4}, 1, "ended with exit code 4, and no exception"),
        (TIMED_OUT, 1, "it ended early without an error, or it hangs"),
        (TIMED_OUT, 2, "one on another node failed first"),
    ],
)
def test_a_root_is_explained(changes: dict[str, object], num_nodes: int, words: str) -> None:
    assert words in describe_root(failure(0, **changes), num_nodes=num_nodes)


@pytest.mark.parametrize(
    ("ended", "words"), [([1], "not answer: rank 1 ended with exit code 0."), ([1, 3], "ranks 1, 3 ended")]
)
def test_ranks_that_had_ended_are_the_cause_of_a_broken_connection_alone(
    ended: list[int], words: str
) -> None:
    shown = describe_root(failure(0, **BROKEN), num_nodes=1, ended=ended)
    assert words in shown
    assert "most likely" not in shown
    assert "exit code 0" not in describe_root(failure(0, **BOOM), num_nodes=1, ended=ended)


def test_lack_of_memory_is_said_where_the_kernel_counted_a_kill() -> None:
    shown = describe_root(failure(0, exit_code=-9), num_nodes=1, lacked_memory=True)
    assert "SIGKILL: most likely by the kernel, which has killed for lack of memory during the run" in shown
    assert "memory" not in describe_root(failure(0, exit_code=-15), num_nodes=1, lacked_memory=True)


HANG = "no progress for 5 s on rank 0; likely culprit: rank 1\n   rank\n>  1\nAll stacks: hang.txt"


@pytest.mark.parametrize("changes", [TIMED_OUT, {"exit_code": 124}, {"exit_code": -6}])
def test_a_hang_comes_last_and_in_place_of_other_causes(changes: dict[str, object]) -> None:
    shown = describe_root(failure(0, **changes), num_nodes=2, ended=[1], hang=HANG)
    assert shown.endswith(f"\ndrivetrain: the hang before it: {HANG}\n")
    assert "did not answer" not in shown
    assert "the hang" not in describe_root(failure(0, **BOOM), num_nodes=1, hang=HANG)


@pytest.mark.parametrize("num_lines", [5, 50])
def test_the_last_lines_name_the_rank_and_its_folder(num_lines: int) -> None:
    text = "Traceback\n" + "  a frame\n" * (num_lines - 2) + "ValueError: boom\n"
    root = failure(2, error="ValueError: boom", traceback=text, where="train.py:8")
    lines = describe_root(root, num_nodes=1, folder=Path("logs/2")).splitlines()
    who = "drivetrain: rank 2 (local rank 2, process 102, output in logs/2) failed"
    assert [line for line in lines[-15:] if who in line] == [
        who + (":" if num_lines == 5 else " at train.py:8")
    ]
    assert lines.count("ValueError: boom") == 1


def test_the_others_get_a_line_each_and_those_that_ended_alike_share_one() -> None:
    root = failure(1, **BOOM)
    others = [
        failure(0, **BROKEN),
        failure(2, exit_code=-15),
        failure(3, exit_code=-9),
        failure(4, exit_code=7),
        failure(5, **BOOM),
        failure(7, **TIMED_OUT, where="/home/ada/train.py:8"),
        failure(8, **TIMED_OUT, where="/home/ada/train.py:8"),
    ]
    lines = describe_others(root, [root, *others, failure(6, **BOOM)]).splitlines()
    assert lines == [
        "drivetrain: the other ranks of this node:",
        "  rank 0: RuntimeError, waiting for another rank",
        "  rank 2: stopped by the launcher",
        "  rank 3: killed (SIGKILL): by the launcher if it did not stop in time, else by another process",
        "  rank 4: exit code 7",
        "  ranks 5, 6: the same error",
        "  ranks 7, 8: RuntimeError at train.py:8, waiting for another rank",
    ]
    assert "  rank 5: the same error\n" in describe_others(root, [root, *others])
    assert describe_others(root, [root]) == ""


@pytest.mark.parametrize(
    ("changes", "shell"),
    [
        ({"exit_code": 5}, 5),
        ({"exit_code": -9}, 137),
        ({"exit_code": None}, 1),
        ({"exit_code": -15}, 143),
        ({"exit_code": -15, **BOOM}, 1),  # the launcher stopped it meanwhile
    ],
)
def test_the_shell_gets_the_ranks_code(changes: dict[str, object], shell: int) -> None:
    assert failure(0, **changes).shell_code == shell


def test_what_is_recorded_is_read_back(tmp_path: Path) -> None:
    file = tmp_path / "error.json"
    try:
        raise KeyError("weights")
    except KeyError as error:
        record_error(file, error, was_shown=True)
    read = read_failure(json.loads(file.read_text()), rank=5, local_rank=1, pid=7, exit_code=1, seen=0.0)
    assert read.error == "KeyError: 'weights'"
    assert 'raise KeyError("weights")' in read.traceback
    assert re.fullmatch(r".*/test_failures\.py:\d+", read.where)
    assert read.was_shown
    assert read.time > 0


def test_a_rank_that_left_nothing_has_its_exit_code_alone() -> None:
    read = read_failure({"message": "<NONE>"}, rank=0, local_rank=0, pid=1, exit_code=-9, seen=4.0)
    assert (read.error, read.traceback, read.time, read.signal) == ("", "", 4.0, "SIGKILL")


def shown_to_user(action: Callable[[], object]) -> str:
    try:
        action()
    except (ValueError, LookupError, TypeError, RuntimeError) as error:
        return format_for_user(error)
    raise AssertionError("nothing failed")


def behind_another_error(action: Callable[[], object]) -> None:
    try:
        raise KeyError("first")
    except KeyError:
        action()


@pytest.mark.parametrize(
    ("action", "module", "last"),
    [
        (lambda: ParallelDims(tensor=3).plan(2), "state.mesh", "ValueError: "),
        (lambda: MemoryTracker(None).stop(), "memory.tracker.memory_tracker", "RuntimeError: "),
    ],
    ids=["value", "order of calls"],
)
def test_an_error_of_ours_is_shown_down_to_the_users_line(
    action: Callable[[], object], module: str, last: str
) -> None:
    shown = shown_to_user(action)
    assert "in <lambda>" in shown
    assert f"  (found by drivetrain_{module}, line " in shown
    assert f"{module.rpartition('.')[2]}.py" not in shown
    assert shown.splitlines()[-1].startswith(last)


@pytest.mark.parametrize(
    "action",
    [
        lambda: int("x"),
        lambda: {}["x"],
        lambda: describe_tail(failure(1), 3),  # type: ignore[arg-type]
        lambda: behind_another_error(lambda: ParallelDims(tensor=3).plan(2)),
    ],
    ids=["user's ValueError", "user's KeyError", "native code", "behind another"],
)
def test_other_errors_are_shown_in_full(action: Callable[[], object]) -> None:
    assert "found by" not in shown_to_user(action)


def test_a_broken_connection_is_shown_down_to_the_users_line_without_native_frames() -> None:
    work: Future[None] = Future()
    work.set_exception(RuntimeError("Broken pipe\nException raised from recv at a.h:1\nframe #0: c10"))
    shown = shown_to_user(work.result)
    assert shown.endswith("; frames of libraries are left out)\nRuntimeError: Broken pipe\n")
    assert "concurrent/futures" not in shown
    work = Future()
    work.set_exception(RuntimeError("another"))
    assert "concurrent/futures" in shown_to_user(work.result)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"error": "ValueError: two\nlines"}, "failed: ValueError: two"),
        ({"exit_code": -9}, "was ended by SIGKILL"),
        ({"exit_code": 3}, "ended with exit code 3"),
    ],
)
def test_a_failure_is_told_at_once_in_one_line(changes: dict[str, object], said: str) -> None:
    line = announce(failure(2, **changes), seconds=30.0)
    assert line == f"rank 2 {said}; the other ranks stop now, and have 30 s to save"


def test_the_last_lines_are_shown_with_their_rank() -> None:
    assert describe_tail(failure(1), []) == ""
    assert describe_tail(failure(1), ["a"]) == "drivetrain: the last line of rank 1:\n  a\n"
    assert describe_tail(failure(1), ["a", "b"]) == "drivetrain: the last 2 lines of rank 1:\n  a\n  b\n"
