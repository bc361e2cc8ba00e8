"""What output costs: a line that a rank prints, and megabytes of it, under each launcher.

uv run --group bench python benchmarks/output.py
"""

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

from rounds import Table, parse_arguments, report, take_turns

BIN = Path(sys.executable).parent
NUM_PRINTS, NUM_LINES, LINE_BYTES = 20_000, 40_000, 1000
# Each rank times its own output; the slower one counts.
SCRIPT = f"""
import os, sys, time
folder = sys.argv[2]
start = time.perf_counter()
if sys.argv[1] == "print":
    for step in range({NUM_PRINTS}):
        print("step", step, "loss", 0.123456, "and some more words for a usual length")
    seconds = (time.perf_counter() - start) / {NUM_PRINTS}
else:
    block = (b"x" * {LINE_BYTES - 1} + b"\\n") * 64
    for _ in range({NUM_LINES} // 64):
        os.write(1, block)
    seconds = time.perf_counter() - start
open(os.path.join(folder, os.environ["RANK"]), "w").write(str(seconds))
"""


def under(folder: Path, kind: str, *command: str) -> Callable[[], float]:
    """A turn: the seconds of the slower of two ranks, whose output somebody reads from a pipe."""

    def turn() -> float:
        process = subprocess.Popen(
            [*command, str(folder / "script.py"), kind, str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert process.stdout is not None
        reader = threading.Thread(target=_drain, args=(process.stdout.fileno(),))
        reader.start()
        assert process.wait() == 0
        reader.join()
        process.stdout.close()
        return max(float((folder / str(rank)).read_text()) for rank in (0, 1))

    return turn


def _drain(file: int) -> None:
    while os.read(file, 1 << 20):
        pass


def main() -> None:
    """Time every case."""
    arguments = parse_arguments(__doc__, rounds=5)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "script.py").write_text(SCRIPT)
        torchrun = (str(BIN / "torchrun"), "--nproc-per-node", "2", "--standalone")
        drivetrain = (str(BIN / "drivetrain"), "launch", "--cpu", "--num-processes", "2")
        commands = {
            "torchrun": torchrun,
            "torchrun --tee 3": (*torchrun, "--tee", "3", "--log-dir", str(folder / "torchrun")),
            "drivetrain launch": drivetrain,
            "drivetrain launch --no-prefix": (*drivetrain, "--no-prefix"),
            "drivetrain launch --log-dir": (*drivetrain, "--log-dir", str(folder / "drivetrain")),
        }
        megabytes = NUM_LINES * LINE_BYTES // 1_000_000
        tables = [
            Table(
                title=title,
                unit=unit,
                measured=take_turns(
                    {label: under(folder, kind, *command) for label, command in commands.items()},
                    rounds=arguments.rounds,
                ),
            )
            for kind, title, unit in (
                ("print", "One printed line of a rank, two ranks at once", "us"),
                ("write", f"{megabytes} MB of each of two ranks, until they are written", "s"),
            )
        ]
    report("output", tables, arguments)


if __name__ == "__main__":
    main()
