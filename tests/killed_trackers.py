"""Kill writers of a platform by SIGKILL at random points, and let new ones go on as a forwarder does.

One process imports the library and forks a writer for each round. A writer reports each `write` that returned.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from drivetrain_tracking.values.records import LoggedRecord

# What wandb and ClearML leave for processes that are to join the tests' own runs.
_LEFT_BEHIND = ("WANDB_SERVICE", "CLEARML_PROC_MASTER_ID", "TRAINS_PROC_MASTER_ID")

_DRIVER = """
import importlib, json, os, random, signal, sys, time
from killed_trackers import numbered_records

module, name, imports, directory, options, num_rounds, num_records, seed = json.loads(sys.argv[1])
kind = getattr(importlib.import_module(module), name)
for library in imports:
    importlib.import_module(library)
chance = random.Random(seed)
records = numbered_records(num_records)


def write(done, upto, told):
    tracker = kind(directory)
    tracker.start("killed", {"seed": 1}, **options)
    held = done + tracker.count_held(records[done:])
    os.write(told, b"%d\\n" % held)
    while held < upto:
        tracker.write(records[held:min(held + 3, upto)])
        held = min(held + 3, upto)
        os.write(told, b"%d\\n" % held)
    tracker.finish()


rounds = []
done = 0
for number in range(num_rounds + 1):
    is_last = number == num_rounds
    upto = num_records * (number + 1) // (num_rounds + 1)
    reads, told = os.pipe()
    writer = os.fork()
    if writer == 0:
        os.close(reads)
        try:
            write(done, upto, told)
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    os.close(told)
    with os.fdopen(reads) as lines:
        said = [int(lines.readline())]
        if not is_last:
            until = chance.randint(said[0], upto)
            while said[-1] < until and (line := lines.readline()):
                said.append(int(line))
            time.sleep(chance.random() * 0.02)
            os.kill(writer, signal.SIGKILL)
        said += [int(line) for line in lines]
    status = os.waitstatus_to_exitcode(os.waitpid(writer, 0)[1])
    done = said[-1]
    rounds.append((said[0], done, status))
print("ROUNDS", json.dumps(rounds))
"""


Row = tuple[int | None, dict[str, float]]  # the step and the flat values of a record


def numbered_records(num_records: int) -> list[LoggedRecord]:
    """Return records whose time, step and values follow from their number."""
    return [
        LoggedRecord(
            time=1_700_000_000 + n / 8, step=n, values={"loss": n / 4, "lr": {"head": n / 8, "body": n / 16}}
        )
        for n in range(num_records)
    ]


def numbered_rows(num_records: int) -> list[Row]:
    return [(record.step, record.numbers) for record in numbered_records(num_records)]


def distinct_rows(rows: Sequence[Row]) -> list[Row]:
    """Return rows without those that a platform holds a second time, which each equal the first."""
    return [row for number, row in enumerate(rows) if row not in rows[:number]]


def kill_writers(
    tracker: type,
    imports: Sequence[str],
    directory: Path,
    *,
    options: Mapping[str, object] | None = None,
    environment: Mapping[str, str] | None = None,
    num_rounds: int,
    num_records: int,
) -> None:
    """Run killed writers, then one that ends: all records are written, none of them again after its `write` returned.

    Args:
        tracker: The class of the tracker.
        imports: The modules of its library that are imported before writers are forked.
        directory: The tracker's directory.
        options: Keyword arguments of `start`.
        environment: Further variables of the writers.
        num_rounds: The number of writers that are killed.
        num_records: The number of records that are written in all.
    """
    given = [tracker.__module__, tracker.__qualname__, list(imports), str(directory), dict(options or {})]
    given += [num_rounds, num_records, os.getpid()]  # which seeds the points
    inherited = {name: value for name, value in os.environ.items() if name not in _LEFT_BEHIND}
    done = subprocess.run(
        [sys.executable, "-c", _DRIVER, json.dumps(given)],
        capture_output=True,
        text=True,
        cwd=directory,
        env={**inherited, **(environment or {}), "PYTHONPATH": str(Path(__file__).parent)},
        timeout=150,
    )
    told = [line for line in done.stdout.splitlines() if line.startswith("ROUNDS ")]
    assert told, f"the rounds failed:\n{done.stdout}{done.stderr}"
    rounds = json.loads(told[0].removeprefix("ROUNDS "))
    print("held at the start, written, exit status:", rounds)
    assert rounds[-1][1:] == [num_records, 0], f"the last writer ended with {rounds[-1]}\n{done.stderr}"
