"""Workers that are kept: real processes, started by this one."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from drivetrain_launcher import RankFailedError, Workers


@pytest.fixture(scope="module")
def workers(python: str) -> Iterator[Workers]:
    """Two workers that the tests of this file share."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", python)
        patch.delenv("PYTHONUNBUFFERED", raising=False)
        with Workers(2, cpu=True) as workers:
            yield workers


def test_calls_share_processes_but_no_process_group_variable_or_folder(
    workers: Workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def first() -> int:
        os.environ["LEFT_BEHIND"] = "x"
        os.chdir("/")
        dist.init_process_group("gloo")
        dist.barrier()
        return os.getpid()

    def second() -> tuple[Any, ...]:
        was_initialized = dist.is_initialized()
        dist.init_process_group("gloo")
        total = torch.ones(1)
        dist.all_reduce(total)
        return (
            os.getpid(),
            was_initialized,
            os.getenv("LEFT_BEHIND"),
            os.getenv("GIVEN"),
            os.getcwd(),
            total.item(),
        )

    monkeypatch.chdir(tmp_path)
    pids = workers.run(first)
    monkeypatch.setenv("GIVEN", "now")
    assert workers.run(second) == [(pid, False, None, "now", str(tmp_path), 2.0) for pid in pids]


def test_after_a_failure_fresh_processes_take_the_next_call(workers: Workers) -> None:
    class UnreadableError(Exception):
        def __init__(self, first: str, second: str) -> None:
            super().__init__(first + second)

    def fail() -> None:
        if os.environ["RANK"] == "1":
            raise UnreadableError("half and ", "half")
        time.sleep(100)

    pids = workers.run(os.getpid)
    with pytest.raises(RankFailedError, match=r"rank 1 (.|\n)*UnreadableError: half and half") as caught:
        workers.run(fail)
    # Its class cannot be made again from what pickle keeps of it.
    assert (caught.value.rank, caught.value.error) == (1, None)
    assert not set(pids) & set(workers.run(os.getpid))


def test_the_first_cause_is_shown_not_the_connection_that_it_broke(workers: Workers) -> None:
    def fail() -> None:
        dist.init_process_group("gloo")
        dist.barrier()
        if os.environ["RANK"] == "1":
            raise KeyError("the cause")
        dist.barrier()

    with pytest.raises(RankFailedError, match=r"rank 1 (.|\n)*KeyError: 'the cause'") as caught:
        workers.run(fail)
    assert isinstance(caught.value.error, KeyError)


@pytest.mark.parametrize(
    ("end", "text"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "was ended by SIGKILL"),
        (lambda: os._exit(3), "ended with exit code 3, and no exception"),
        (lambda: sys.exit("no"), "SystemExit: no"),
    ],
)
@pytest.mark.slow
def test_the_end_of_a_process_is_told(workers: Workers, end: Any, text: str) -> None:
    with pytest.raises(RankFailedError, match=text):
        workers.run(lambda: end() if os.environ["RANK"] == "0" else time.sleep(100))


def test_a_function_may_exit_with_success(workers: Workers) -> None:
    assert workers.run(sys.exit, (0,)) == [None, None]


def test_a_return_value_that_cannot_be_read_here_is_named_with_its_rank(
    workers: Workers, tmp_path: Path
) -> None:
    (tmp_path / "only_in_ranks.py").write_text("class Found: pass\n")

    def train() -> Any:
        sys.path.append(str(tmp_path))
        import only_in_ranks  # pyright: ignore

        return only_in_ranks.Found()

    with pytest.raises(
        RankFailedError, match=r"return value of rank 0 cannot be read.*No module named 'only_in"
    ):
        workers.run(train)


def test_output_of_c_code_and_of_children_is_shown(
    workers: Workers, capsys: pytest.CaptureFixture[str]
) -> None:
    def speak() -> None:
        if os.environ["RANK"] == "1":
            os.write(1, b"from C\n")
            subprocess.run(["echo", "from a child"], check=True)

    workers.run(speak)
    assert capsys.readouterr().out == "[rank 1] from C\n[rank 1] from a child\n"


def process_of(rank: int) -> int:
    """Return the child that was started for a rank: the rank itself, or what stands for it if it was forked."""
    asked = ["ps", "-o", "pid=", "--ppid", str(os.getpid())]
    for pid in subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split():
        with suppress(OSError):  # ps itself
            words, variables = (Path("/proc", pid, name).read_bytes() for name in ("cmdline", "environ"))
            if b"rank_main" in words and b"RANK=%d" % rank in variables.split(b"\0"):
                return int(pid)
    raise AssertionError(f"no process of rank {rank}")


@pytest.mark.slow
def test_a_process_that_ends_between_calls_is_replaced(
    workers: Workers, capsys: pytest.CaptureFixture[str]
) -> None:
    pid = workers.run(os.getpid)[1]
    started = process_of(1)
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, started, os.WEXITED | os.WNOWAIT)
    assert workers.run(os.getenv, ("RANK",)) == ["0", "1"]
    assert "has ended since the last call; the workers start anew" in capsys.readouterr().err


def test_large_values_pass_both_ways(workers: Workers) -> None:
    value = torch.arange(3_000_000)
    for found in workers.run(lambda: value + 1):
        assert torch.equal(found, value + 1)


def test_a_call_within_a_call_is_refused(workers: Workers, tmp_path: Path) -> None:
    begun, may_end = tmp_path / "begun", tmp_path / "may_end"
    errors: list[str] = []

    def wait_until(path: Path) -> None:
        while not path.exists():
            time.sleep(0.01)

    def run_long() -> None:
        begun.touch()
        wait_until(may_end)

    def call_again() -> None:
        wait_until(begun)
        try:
            workers.run(os.getpid)
        except RuntimeError as error:
            errors.append(str(error))
        may_end.touch()

    other = threading.Thread(target=call_again)
    other.start()
    workers.run(run_long)
    other.join()
    assert errors == ["these workers are running another call; wait for it, or start other workers"]
    assert workers.run(os.getenv, ("RANK",)) == ["0", "1"]


def test_closed_workers_refuse_calls(python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", python)
    workers = Workers(1, cpu=True)
    workers.close()
    workers.close()
    assert repr(workers) == "Workers(num_processes=1, closed)"
    with pytest.raises(RuntimeError, match="these workers are closed"):
        workers.run(os.getpid)
