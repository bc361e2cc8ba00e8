import errno
import logging
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from drivetrain_tracking.errors import SpoolInUseError, TrackerStateError
from drivetrain_tracking.spool.spool import Spool
from drivetrain_tracking.spool.spool_reader import SpoolReader

# Logs until it is killed, and says on stdout what `append` has returned from.
TRAINER = """
import os, sys
from pathlib import Path
from drivetrain_tracking.spool.spool import Spool
spool = Spool(Path(sys.argv[1]))
for step in range(10**9):
    spool.append({"step": step, "loss": 1 / (step + 1), "note": "x" * (step % 300)})
    os.write(1, b"%d\\n" % step)
"""


def steps_of(path: Path) -> list[int]:
    return [found.record["step"] for found in SpoolReader(path).read()]


def test_records_come_back_in_order_also_while_they_are_written(tmp_path: Path) -> None:
    spool, reader = Spool(tmp_path / "deep" / "log.jsonl"), SpoolReader(tmp_path / "deep" / "log.jsonl")
    assert list(reader.read()) == []
    for step in range(3):
        spool.append({"step": step})
        assert [found.record for found in reader.read()] == [{"step": step}]
    spool.close()
    spool.close()
    assert (list(reader.read()), reader.num_damaged, spool.num_lost) == ([], 0, 0)
    with pytest.raises(TrackerStateError, match="closed"):
        spool.append({"step": 3})


def test_a_reader_goes_on_where_another_ended(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "log.jsonl")
    for step in range(10):
        spool.append({"step": step})
    found = list(SpoolReader(tmp_path / "log.jsonl").read())
    for number, (end, _) in enumerate(found):
        rest = SpoolReader(tmp_path / "log.jsonl", end)
        assert [one.record["step"] for one in rest.read()] == list(range(number + 1, 10))
    spool.close()


def test_lines_longer_than_what_is_read_at_once(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "log.jsonl")
    texts = ["a" * (3 << 20), "b", "c" * (1 << 20)]
    for text in texts:
        spool.append({"text": text})
    assert [found.record["text"] for found in SpoolReader(tmp_path / "log.jsonl").read()] == texts
    spool.close()


@pytest.mark.parametrize("num_rounds", [5, pytest.param(200, marks=pytest.mark.slow)])
def test_a_trainer_that_is_killed_loses_nothing_that_was_logged(tmp_path: Path, num_rounds: int) -> None:
    for number in range(num_rounds):
        path = tmp_path / f"{number}.jsonl"
        trainer = subprocess.Popen(
            [sys.executable, "-c", TRAINER, str(path)], stdout=subprocess.PIPE, text=True
        )
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "0\n"
        time.sleep(0.002 * (number % 20))
        trainer.send_signal(signal.SIGKILL)
        logged = [0, *map(int, trainer.stdout.read().split("\n")[:-1])]
        trainer.wait()
        trainer.stdout.close()
        found = steps_of(path)
        assert found[: len(logged)] == logged
        assert found[len(logged) :] in ([], [len(logged)])  # written, and killed before it could say so


def test_what_a_killed_process_left_of_a_line_is_removed_and_offsets_stay(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    spool = Spool(path)
    spool.append({"step": 0})
    spool.append({"step": 1})
    spool.close()
    reader = SpoolReader(path)
    assert len(list(reader.read())) == 2
    with path.open("ab") as file:
        file.write(b'{"step": 2, "lo')
    assert list(reader.read()) == []  # it may still be written
    spool = Spool(path)
    spool.append({"step": 2})
    spool.close()
    assert [found.record for found in reader.read()] == [{"step": 2}]
    assert reader.num_damaged == 0


def test_a_second_run_in_the_same_file_is_refused(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "log.jsonl")
    with pytest.raises(SpoolInUseError, match="another run logs to this file"):
        Spool(tmp_path / "log.jsonl")
    pid = os.fork()
    if not pid:  # as a worker of a loader, which outlives the trainer
        time.sleep(60)
    spool.close()
    Spool(tmp_path / "log.jsonl").close()
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_a_forked_child_appends_nothing(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "log.jsonl")
    pid = os.fork()
    if not pid:
        try:
            spool.append({"step": 0})
        except TrackerStateError:
            os._exit(0)
        os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
    spool.append({"step": 1})
    spool.close()
    assert steps_of(tmp_path / "log.jsonl") == [1]


def test_a_full_disk_is_told_once_and_what_was_lost_is_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, soft = tmp_path / "log.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    spool = Spool(path)
    spool.append({"step": 0})
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, resource.RLIM_INFINITY))
        for step in (1, 2, 3):
            spool.append({"step": step})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, resource.RLIM_INFINITY))
    assert spool.num_lost == 3
    spool.append({"step": 4})
    spool.append({"step": 5})
    records = [found.record for found in SpoolReader(path).read()]
    assert records == [{"step": 0}, {"event": "lost", "count": 3}, {"step": 4}, {"step": 5}]
    with caplog.at_level(logging.WARNING):
        spool.close()
    assert len(caplog.messages) == 2
    assert "training goes on" in caplog.messages[0]
    assert caplog.messages[1] == f"3 records could not be written to {path}"


def test_threads_lose_and_damage_nothing(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    spool = Spool(path)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [
            threading.Thread(target=lambda: [spool.append({"step": step}) for step in range(1000)])
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    spool.close()
    reader = SpoolReader(path)
    assert sorted(found.record["step"] for found in reader.read()) == sorted(list(range(1000)) * 4)
    assert (reader.num_damaged, spool.num_lost) == (0, 0)


def test_a_flush_that_fails_is_told_once_and_so_is_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "log.jsonl"
    flush, fails, flushed = os.fdatasync, threading.Event(), threading.Semaphore(0)
    fails.set()

    def fail(file: int) -> None:
        if not os.path.samestat(os.fstat(file), path.stat()):
            return flush(file)
        flushed.release()
        if fails.is_set():
            raise OSError(errno.EIO, "broken")
        return None

    monkeypatch.setattr("os.fdatasync", fail)
    spool = Spool(path, flush_seconds=0.01)
    for number in range(8):
        if number == 5:
            fails.clear()
        spool.append({"step": number})
        assert flushed.acquire(timeout=60)
    spool.close()
    told = [message for message in caplog.messages if str(path) in message]
    assert len(told) == 2
    assert "cannot be flushed to the disk" in told[0]
    assert told[1] == f"{path} is flushed to the disk again"


def test_what_was_written_is_flushed_by_the_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log.jsonl"
    flushed: list[float] = []
    flush = os.fdatasync

    def note_flush(file: int) -> None:
        if os.path.samestat(os.fstat(file), path.stat()):  # spools of earlier tests may still be open
            flushed.append(time.monotonic())
        flush(file)

    monkeypatch.setattr("os.fdatasync", note_flush)
    spool = Spool(path, flush_seconds=0.05)
    time.sleep(0.2)
    assert flushed == []  # nothing was written
    spool.append({"step": 0})
    deadline = time.monotonic() + 60
    while not flushed and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.2)
    assert len(flushed) == 1
    spool.close()
    flushed.clear()
    spool = Spool(path, flush_seconds=3600)
    spool.append({"step": 1})
    spool.close()
    assert len(flushed) == 1
