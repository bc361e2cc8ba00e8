"""Measure what a card shows, within eight minutes: one table after the other, each in a process of its own.

    python benchmarks/cuda/run.py --out FOLDER
    python benchmarks/cuda/run.py --out FOLDER --only gpt_step save_held
    python benchmarks/cuda/run.py --out FOLDER --device cpu --dry

The second measures two tables alone; the third plays every script at tiny sizes. Tables that stand neither in
benchmarks/results/cuda nor in FOLDER come first; those that are not begun within the time are told. The packages must
be importable: installed, or on PYTHONPATH. FOLDER gets a log and a file of tables for each script, written as they
come, and a summary. What the scripts save and offload is on the disk of temporary files, which TMPDIR names. The exit
code is 1 if a script failed or ran out of its own time, 2 where there is no card, and 9 if a script was not begun.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from plan import ALL_SECONDS, DRY_SLACK, KEPT, SCRIPTS, Script, choose, limit_of

HERE = Path(__file__).resolve().parent
LAST_LINES = 12  # of the log of a script that failed
NOT_BEGUN = 9
LEFT_OUT = "left out: "  # how a line of a log begins that names what was not measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a script.

    Attributes:
        script: The script.
        seconds: What it took; None if it was not begun.
        code: Its exit code; None if it was ended at its limit, or not begun.
        lines: Its log.
    """

    script: Script
    seconds: float | None = None
    code: int | None = None
    lines: tuple[str, ...] = ()

    @property
    def failed(self) -> bool:
        """Whether it was begun, and did not end as it should."""
        return self.seconds is not None and self.code != 0

    def __str__(self) -> str:
        if self.seconds is None:
            return f"- {self.script.name}: not begun, for the time was over"
        left_out = [line.removeprefix(LEFT_OUT) for line in self.lines if line.startswith(LEFT_OUT)]
        told = f"; left out: {'; '.join(left_out)}" if left_out else ""
        if not self.failed:
            return f"- {self.script.name}: measured in {self.seconds:.0f} s{told}"
        word = "ended at its limit" if self.code is None else f"failed with {self.code}"
        log = "".join(f"\n      {line}" for line in self.lines[-LAST_LINES:])
        return f"- {self.script.name}: **{word}** after {self.seconds:.0f} s{told}{log}"


def main(words: Sequence[str]) -> int:
    """Run the scripts that are asked for, and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for logs and tables")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="cuda; in a dry run without a card, cpu")
    parser.add_argument("--dry", action="store_true", help="play every script at tiny sizes")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="NAME", choices=[script.name for script in SCRIPTS],
        help="tables to measure",
    )  # fmt: skip
    parser.add_argument("--seconds", type=float, default=ALL_SECONDS, help="the most that all may take")
    options = parser.parse_args(words)
    begin = time.monotonic()
    card = None if options.device == "cpu" else find_card()
    if card is None and not options.dry:
        print("no card: the figures of a CPU are those of benchmarks/; --dry plays these at tiny sizes")
        return 2
    if card is None and options.device == "cuda":
        print("no card: leave out --device cuda")
        return 2
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    flags = ["--results", str(out), "--device", "cpu" if card is None else "cuda"]
    flags += ["--dry"] if options.dry else []
    slack = DRY_SLACK if options.dry else 1.0
    outcomes: list[Outcome] = []
    for script in choose(options.only, kept=(KEPT, out)):
        left = options.seconds * slack - (time.monotonic() - begin)
        outcomes.append(run(script, flags, out, left, slack=slack))
        print(outcomes[-1], flush=True)
        (out / "summary.md").write_text("\n".join([f"# {card or 'no card'}", "", *map(str, outcomes), ""]))
    if any(outcome.failed for outcome in outcomes):
        return 1
    return NOT_BEGUN if any(outcome.seconds is None for outcome in outcomes) else 0


def find_card() -> str | None:
    """Return the card in words, asked in a process of its own; None where torch finds none.

    Raises:
        RuntimeError: torch could not be asked.
    """
    asked = subprocess.run(
        [sys.executable, str(HERE / "card.py")], capture_output=True, text=True, timeout=120, check=False
    )
    if asked.returncode not in (0, 3):
        raise RuntimeError(f"{sys.executable} could not ask torch for a card:\n{asked.stderr}")
    return asked.stdout.strip() if asked.returncode == 0 else None


def run(
    script: Script, flags: Sequence[str], out: Path, left_seconds: float, *, slack: float = 1.0
) -> Outcome:
    """Run one script under its limit, with its output in its log."""
    limit = limit_of(script, left_seconds, slack=slack)
    if limit is None:
        return Outcome(script=script)
    path = os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")]))
    log, begin = out / f"{script.name}.log", time.monotonic()
    with log.open("w") as file, TemporaryDirectory(ignore_cleanup_errors=True) as disk:
        command = [sys.executable, str(HERE / script.file), *script.arguments(limit), *flags, "--disk", disk]
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
            env={**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
        try:
            code: int | None = process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end(process)
    lines = tuple(log.read_text(errors="replace").splitlines())
    return Outcome(script=script, seconds=time.monotonic() - begin, code=code, lines=lines)


def end(process: "subprocess.Popen[bytes]") -> None:
    """End a script that still runs, with the processes that it started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def interrupt(*_: object) -> None:
    """End this program as Ctrl+C does, so that the script that runs is ended too."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, interrupt)
    sys.exit(main(sys.argv[1:]))
