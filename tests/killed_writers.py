"""Rounds in which the process of a tracker is killed at a random point, and another process goes on.

`run_killed_writers(code, folder, ...)` starts one process that imports the platform's library once, and forks a
writer for each round. A writer goes on where the last one was killed, as a forwarder does: it asks `count_held` of
the records that were on their way, and writes the rest. After the last round it writes what is left, and finishes the
run.
"""

import subprocess
import sys
from pathlib import Path

RECORDS_A_ROUND = 15
FIRST_TIME = 1_700_000_000.125

_SCRIPT = """
import os, random, signal, sys
from pathlib import Path
from drivetrain_tracking.records import LoggedRecord
{code}
folder, rounds, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
draw = random.Random(seed)
records = [
    LoggedRecord(time={first} + n, step=n, values={{"loss": n / 4, "lr": {{"head": n / 8, "body": n / 16}}}})
    for n in range({count})
]
written = folder / "written"  # how many records `write` has returned for


def write_on(pipe, seed):
    draw = random.Random(seed)
    tracker = make(folder)
    begin(tracker)
    at = int(written.read_text() or 0) if written.exists() else 0
    at += tracker.count_held(records[at : at + 5])
    while at < len(records):
        size = draw.randint(1, 5)
        tracker.write(records[at : at + size])
        at = min(at + size, len(records))
        beside = written.with_suffix(".new")
        beside.write_text(str(at))
        beside.replace(written)
        os.write(pipe, b".")
    tracker.finish()


for number in range(rounds + 1):
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        signal.alarm(60)  # a writer that hangs ends itself
        try:
            write_on(writing, seed + number)
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    os.close(writing)
    if number < rounds:
        for _ in range(draw.randint(0, 4)):
            if not os.read(reading, 1):
                break
        if draw.random() < 0.8:
            import time
            time.sleep(draw.random() * {jitter})
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    os.close(reading)
    if number == rounds or not os.WIFSIGNALED(status):
        assert status == 0, status
"""


def run_killed_writers(
    code: str, folder: Path, *, rounds: int, seed: int = 0, jitter_seconds: float = 0.004
) -> list[tuple[int, dict[str, float]]]:
    """Kill as many writers as there are rounds, let the last one finish, and return what to read back.

    Args:
        code: Statements that import the library and define `make(folder)`, a tracker, and `begin(tracker)`.
        folder: An empty folder.
        rounds: The number of kills.
        seed: The seed of the points at which writers are killed.
        jitter_seconds: The longest time between a write's return and a kill.
    """
    count = RECORDS_A_ROUND * (rounds + 1)
    script = folder / "writers.py"
    script.write_text(_SCRIPT.format(code=code, first=FIRST_TIME, count=count, jitter=jitter_seconds))
    command = [sys.executable, str(script), str(folder), str(rounds), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=folder, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [(n, {"loss": n / 4, "lr/head": n / 8, "lr/body": n / 16}) for n in range(count)]
