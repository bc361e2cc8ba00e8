"""Programs written for Accelerate, unchanged: under the real Accelerate and under drivetrain-accelerate.

    uv run --group bench python benchmarks/drop_in.py

Each measurement is a process of its own, or two; libraries take turns. The programs are in `drop_in_programs`: they
import `accelerate`, and `python -m drivetrain_accelerate` runs the same file on drivetrain. Where all happens in one
process, CPU time is measured, since other programs of the machine hardly change it; elsewhere the clock's.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rounds import RESULTS, Table, installed, report

PROGRAMS = Path(__file__).parent / "drop_in_programs"
REAL, OURS, RAW = "Accelerate", "drivetrain-accelerate", "raw PyTorch"


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much each program does."""

    trainer_steps: int = 100
    classifier_steps: int = 500
    millions_of_parameters: int = 50
    millions_of_samples: int = 20
    batches: int = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One program that contestants run in turn.

    Attributes:
        program: Its name.
        flags: Its arguments.
        processes: The processes of one run.
        has_raw: Whether it has a form in torch alone.
        shown: The title and unit of each number that the program finds.
    """

    program: str
    flags: Sequence[str] = ()
    processes: int = 1
    has_raw: bool = False
    shown: Mapping[str, tuple[str, str]]


def comparisons(size: Size) -> dict[str, Comparison]:
    """Every comparison but resuming, which needs saved runs first; by the name that --only takes."""
    steps = ("--steps", str(size.classifier_steps))
    return {
        "trainer": Comparison(
            program="trainer",
            flags=("--steps", str(size.trainer_steps)),
            shown={
                "step": ("A step of transformers' Trainer, Llama of 0.4 million parameters, CPU time", "ms")
            },
        ),
        "classifier": Comparison(
            program="classifier",
            flags=steps,
            has_raw=True,
            shown={
                "step": ("A step of a small classifier in an epoch, one process, CPU time", "us"),
                "evaluation": (
                    "A batch of its evaluation with `gather_for_metrics`, one process, CPU time",
                    "us",
                ),
            },
        ),
        "classifier on two": Comparison(
            program="classifier",
            flags=steps,
            processes=2,
            has_raw=True,
            shown={
                "step": ("A step of the classifier, two processes", "us"),
                "evaluation": ("A batch of its evaluation with `gather_for_metrics`, two processes", "us"),
            },
        ),
        "checkpoint": Comparison(
            program="checkpoint",
            flags=("--millions", str(size.millions_of_parameters)),
            shown={
                "save": (f"`save_state` of {size.millions_of_parameters} million parameters with AdamW", "s"),
                "save to disk": ("The same, until its files are on the disk", "s"),
                "load": ("`load_state` of the same, at once", "s"),
                "load from disk": ("`load_state` of the same, from the disk", "s"),
                "bytes": ("The checkpoint on the disk", "MB"),
            },
        ),
        "dispatch": Comparison(
            program="dispatch",
            flags=("--batches", str(size.batches)),
            processes=2,
            shown={
                "batch": ("A batch of an iterable dataset that the main process reads, two processes", "us")
            },
        ),
        "start": Comparison(
            program="start",
            has_raw=True,
            shown={"start": ("From the interpreter's start to a prepared model, CPU time", "s")},
        ),
    }


def run(comparison: Comparison, contestant: str) -> dict[str, float]:
    """Run a program once as one contestant, and return what it found."""
    command = [sys.executable]
    if comparison.processes > 1:
        launch = (
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(comparison.processes),
        )
        command += launch
    command += ["-m", "drivetrain_accelerate"] if contestant == OURS else []
    command += [str(PROGRAMS / f"{comparison.program}.py"), *comparison.flags]
    command += ["--raw"] if contestant == RAW else []
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    found = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    return json.loads(found[-1].removeprefix("FOUND ")) if found else {}


def measure(
    comparison: Comparison,
    contestants: Sequence[str],
    rounds: int,
    run_as: Callable[[Comparison, str], dict[str, float]] = run,
) -> list[Table]:
    """Have the contestants run a program in turn, and return a table for each number."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in contestants}
    for number in range(rounds):
        start = number % len(contestants)
        for name in (*contestants[start:], *contestants[:start]):
            found[name].append(run_as(comparison, name))
            print(f"round {number + 1} of {rounds}: {name}: {found[name][-1]}", file=sys.stderr, flush=True)
    tables: list[Table] = []
    for what, (title, unit) in comparison.shown.items():
        measured = {name: [one[what] for one in taken] for name, taken in found.items()}
        tables.append(Table(title=f"{title}{spread(measured)}", unit=unit, measured=measured))
    return tables


def spread(measured: Mapping[str, Sequence[float]]) -> str:
    """The quartiles of ours in relation to the real one, within rounds; nothing if one of them is missing."""
    if REAL not in measured or len(measured[REAL]) < 3:
        return ""
    ratios = [own / other for own, other in zip(measured[OURS], measured[REAL], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return f" (drivetrain / Accelerate {middle:.2f}, quartiles {low:.2f} to {high:.2f})"


def measure_resume(contestants: Sequence[str], rounds: int, size: Size) -> list[Table]:
    """Save a run of each contestant at 90 % of an epoch, and have them resume in turn."""
    flags = ("--millions", str(size.millions_of_samples))
    title = f"From `load_state` to the first batch, at 90 % of {size.millions_of_samples} million shuffled samples"
    with tempfile.TemporaryDirectory() as folder:

        def started(task: str, name: str) -> Comparison:
            return Comparison(
                program="resume",
                flags=(task, str(Path(folder, name)), *flags),
                shown={"resume": (title, "ms")},
            )

        for name in contestants:
            run(started("save", name), name)
        return measure(
            started("resume", ""), contestants, rounds, lambda _, name: run(started("resume", name), name)
        )


def main() -> None:
    """Measure every comparison, or those that --only names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="rounds, of which all count")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder the table is written to")
    parser.add_argument("--only", nargs="+", default=[], help="names of comparisons, such as start")
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that every program runs")
    arguments = parser.parse_args()
    size = (
        Size(
            trainer_steps=5, classifier_steps=20, millions_of_parameters=1, millions_of_samples=1, batches=20
        )
        if arguments.quick
        else Size()
    )
    peers = [REAL, OURS] if installed("accelerate") else [OURS]
    tables: list[Table] = []
    for name, comparison in comparisons(size).items():
        if not arguments.only or name in arguments.only:
            contestants = [RAW, *peers] if comparison.has_raw else peers
            tables += measure(comparison, contestants, arguments.rounds)
    if not arguments.only or "resume" in arguments.only:
        tables += measure_resume(peers, arguments.rounds, size)
    report("drop_in", tables, arguments)


if __name__ == "__main__":
    main()
