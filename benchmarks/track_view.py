"""What `drivetrain track view` takes to read a long log, and to answer what a panel asks, in one process.

    uv run python benchmarks/track_view.py
    uv run python benchmarks/track_view.py --points 1000000

The log holds one loss. A query asks for a picture of all points, of the middle half, or of 1,000 points.
Python's own `json`, which reads the same lines one by one and keeps nothing, stands beside the index.
"""

import argparse
import json
import random
import resource
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from rounds import RESULTS, Table, repeated, report, take_turns

from drivetrain_tracking.spool.line import LOG_NAME, encode
from drivetrain_tracking.view.answers import CurveQuestion, ShownAxis, answer_curves
from drivetrain_tracking.view.log_reader import LogPlace
from drivetrain_tracking.view.run_index import RunIndex

BEGAN, SECONDS_A_STEP = 1_700_000_000.0, 0.01
NUM_COLUMNS = 1000


def write_log(path: Path, num_points: int) -> None:
    """Write a loss a step, as the tracker does."""
    draw = random.Random(0).random
    with path.open("wb") as file:
        for step in range(num_points):
            time_of_step = BEGAN + step * SECONDS_A_STEP
            file.write(encode({"step": step, "time": time_of_step, "loss": 2 + draw()}))


def read_index(path: Path) -> RunIndex:
    """Build the index of a log."""
    index = RunIndex(LogPlace(label="log", path=path))
    while index.advance():
        pass
    return index


def read_lines(path: Path) -> None:
    """Parse each line."""
    with path.open("rb") as file:
        for line in file:
            json.loads(line)


def timed(call: Callable[[], object]) -> float:
    """The seconds of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def query(index: RunIndex, axis: ShownAxis, low: int, high: int) -> Callable[[], object]:
    """What a panel asks for a range of steps, with its answer as JSON."""
    scale = 1.0 if axis == "step" else SECONDS_A_STEP
    ends = (low * scale, high * scale)
    asked = CurveQuestion(
        metric="loss", runs=[0], axis=axis, low=ends[0], high=ends[1], num_columns=NUM_COLUMNS
    )
    return lambda: json.dumps(answer_curves([index], asked))


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="rounds that count, after one that does not")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder the table is written to")
    parser.add_argument("--points", type=int, default=10_000_000, help="lines of the log")
    arguments = parser.parse_args()
    last = arguments.points - 1
    with TemporaryDirectory() as folder:
        path = Path(folder) / LOG_NAME
        write_log(path, arguments.points)
        index = read_index(path)
        peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        middle = last // 2
        ranges = {
            f"drivetrain, {min(1000, last):,} points": (middle, min(middle + 1000, last)),
            "drivetrain, the middle half": (last // 4, last // 4 * 3),
            "drivetrain, all points": (0, last),
        }
        tables = [
            Table(
                title=f"Picture over {axis}, {NUM_COLUMNS:,} pixels wide",
                unit="ms",
                measured=take_turns(
                    {name: repeated(query(index, axis, *ends), times=5) for name, ends in ranges.items()},
                    rounds=arguments.rounds,
                ),
            )
            for axis in ("step", "relative")
        ]
        readers = {
            "json.loads of each line": lambda: timed(lambda: read_lines(path)),
            "drivetrain, index of the log": lambda: timed(lambda: read_index(path)),
        }
        loads = take_turns(readers, rounds=arguments.rounds, warmup=0)
        size = path.stat().st_size
    tables.insert(0, Table(title="Reading the log", unit="s", measured=loads))
    note = f"{arguments.points:,} points, {size / 1e6:,.0f} MB; {peak_bytes / 1e6:,.0f} MB of memory with the index."
    report("track_view", tables, arguments, note=note)


if __name__ == "__main__":
    main()
