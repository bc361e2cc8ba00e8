"""Tests and benchmarks on a card, in the Python and torch that are there: `python tools/cuda/run.py [PART ...]`.

It needs torch and pytest, installs nothing and asks no network. `tests` and `benchmarks` each end within their
minutes. Both begin with what has never passed or been measured on a card, and write logs and tables as they go, so
that a run that is cut off keeps what it had. `slow` runs the slow tests, if it is named.

With `--dry` no card is needed: the tests run on the simulated device and name those that only a card can show, and
the benchmarks run at sizes of a second.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from source_path import requirements, source_path

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("tests", "benchmarks", "slow")
DEFAULT_PARTS = PARTS[:2]
MINUTES, DRY_MINUTES = 8.0, 30.0
GRACE_SECONDS = 45.0  # for what was begun within the minutes; then all is ended
NOT_BEGUN = 9  # the exit code of a part that passed as far as it went
# What tests and benchmarks use beside what the packages declare; each is named if it is missing.
OPTIONAL = (
    "accelerate", "bitsandbytes", "deepspeed", "lightning", "peft", "pynvml", "torchao", "transformer_engine",
    "transformers", "triton",
)  # fmt: skip
# Folders and files of tests; some of the second have cases for a card beside those for a CPU.
TESTS = ("tests/hardware",)
CARD_TESTS = (
    *TESTS, "tests/precision/fp8/test_torchao_devices.py", "tests/precision/te/test_te_layers.py",
    "tests/drivetrain/fp8/test_fp8_proof.py",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class CardRun:
    """A run on a card, or a dry one.

    Attributes:
        out: The folder of logs and tables.
        minutes: After which a part begins nothing more.
        dry: Whether it plays what needs no card.
        missing: The libraries that are not installed, by the names that they are imported by.
        variables: The environment of what runs.
    """

    out: Path
    minutes: float
    dry: bool
    missing: Sequence[str]
    variables: Mapping[str, str]

    def command(self, part: str) -> list[str]:
        """The arguments of Python that run a part."""
        return self._measure() if part == "benchmarks" else self._test(is_slow=part == "slow")

    def _test(self, *, is_slow: bool) -> list[str]:
        chosen = "slow" if is_slow else "not slow"
        return [
            "-m", "pytest", "-c", str(ROOT / "tools" / "cuda" / "pytest.ini"), "--rootdir", str(ROOT),
            "--confcutdir", str(ROOT / "tests" / "hardware"), "-v", "-rs", "-p", "card_session",
            "--card-out", str(self.out), "--card-minutes", f"{self.minutes:g}",
            "--card-missing", ",".join(self.missing), "-m", chosen if self.dry else f"cuda and {chosen}",
            *[str(ROOT / name) for name in (TESTS if self.dry else CARD_TESTS)],
        ]  # fmt: skip

    def _measure(self) -> list[str]:
        words = [str(ROOT / "benchmarks" / "cuda" / "run.py"), "--out", str(self.out / "benchmarks")]
        words += ["--seconds", f"{60 * self.minutes:g}"]
        return words + (["--device", "cpu", "--dry"] if self.dry else ["--device", "cuda"])


def main(arguments: Sequence[str]) -> int:
    """Run the parts that are asked for; return 1 if anything failed, 2 if there is no card to run on."""
    parser = argparse.ArgumentParser(
        prog="tools/cuda/run.py", description="Test and measure on a CUDA device."
    )
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; the first two if none is named"
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / "build" / "cuda", help="folder of logs and tables (build/cuda)"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        help=f"after which a part begins nothing more ({MINUTES:g}; {DRY_MINUTES:g} with --dry)",
    )
    parser.add_argument("--dry", action="store_true", help="without a card: what can be played anywhere")
    options = parser.parse_args(arguments)
    if unknown := [part for part in options.parts if part not in PARTS]:
        parser.error(f"{unknown[0]!r} is no part; there are {', '.join(PARTS)}")
    minutes = options.minutes or (DRY_MINUTES if options.dry else MINUTES)
    if minutes <= 0:
        parser.error(f"--minutes {minutes:g}: more than 0 is allowed")
    out: Path = options.out.resolve()
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out {out}: no folder can be made there ({error.strerror}); name another one")
    with TemporaryDirectory() as folder:
        variables = environment(Path(folder))
        facts = ask_facts(variables)
        print(described(facts), flush=True)
        (out / "machine.json").write_text(json.dumps(facts, indent=2) + "\n")
        if not facts["cards"] and not options.dry:
            message = "no CUDA device that torch can use: nothing was run; --dry plays what needs none"
            print(message, file=sys.stderr)
            return 2
        run = CardRun(
            out=out,
            minutes=minutes,
            dry=options.dry,
            missing=facts["missing"],
            variables=variables,
        )
        chosen = [part for part in PARTS if part in (options.parts or DEFAULT_PARTS)]
        ends = {part: run_part(part, run) for part in chosen}
    for part, said in ends.items():
        print(f"{part}: {said or 'passed'}")
    print(f"logs and tables are in {out}")
    return int(any(said and not said.startswith("skipped") for said in ends.values()))


def environment(metadata: Path) -> dict[str, str]:
    """The variables of what runs here: the packages' sources, and the folder for their entry points."""
    before = os.environ.get("PYTHONPATH", "")
    path = [*map(str, source_path(ROOT, metadata)), *([before] if before else [])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), "PYTHONUNBUFFERED": "1"}


def ask_facts(variables: Mapping[str, str]) -> dict[str, Any]:
    """The versions, cards and missing libraries, as a process with torch finds them."""
    command = [sys.executable, str(Path(__file__).with_name("machine.py")), *requirements(ROOT), *OPTIONAL]
    path = os.pathsep.join([str(ROOT / "benchmarks" / "cuda"), variables["PYTHONPATH"]])
    done = subprocess.run(
        command, env={**variables, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"torch could not be asked what is there:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def described(facts: Mapping[str, Any]) -> str:
    """The facts as lines for people."""
    return (
        f"Python {facts['python']}, torch {facts['torch']}\n"
        f"cards: {', '.join(facts['cards']) or 'none'}\n"
        f"missing, and what needs it is skipped: {', '.join(facts['missing']) or 'nothing'}"
    )


def run_part(part: str, run: CardRun) -> str:
    """Run a part as a process group of its own, with its output here and in its log.

    Returns:
        What went wrong, or why it was skipped; empty if it passed.
    """
    needed = [name for name in requirements(ROOT) if name in run.missing]
    if part == "benchmarks" and needed:
        return f"skipped: drivetrain wants {', '.join(needed)}"
    begin = time.monotonic()
    limit = 60 * run.minutes + GRACE_SECONDS
    variables = dict(run.variables)
    if part != "benchmarks":
        own = [str(ROOT / "tools" / "cuda"), str(ROOT / "tests")]
        variables["PYTHONPATH"] = os.pathsep.join([*own, variables["PYTHONPATH"]])
    with (run.out / f"{part}.log").open("w") as log:
        running = subprocess.Popen(
            [sys.executable, *run.command(part)], cwd=ROOT, env=variables, text=True, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        ending = threading.Timer(limit, _end, [running])
        ending.start()
        assert running.stdout is not None
        for line in running.stdout:
            for place in (sys.stdout, log):
                place.write(line)
                place.flush()
        code = running.wait()
        ending.cancel()
    seconds = time.monotonic() - begin
    print(f"{part}: {seconds:.0f} s", flush=True)
    if code and seconds > limit:
        return f"ended after {seconds:.0f} s"
    if code == NOT_BEGUN:
        return "not all was begun: run it again with the same --out, which begins with that"
    return f"exit code {code}" if code else ""


def _end(running: "subprocess.Popen[str]") -> None:
    with suppress(ProcessLookupError):
        os.killpg(running.pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
