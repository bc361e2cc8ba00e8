"""What the benchmarks share: contestants take turns in rounds, and medians become a table with ratios."""

import argparse
import datetime
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

RESULTS = Path(__file__).parent / "results"
# Whose versions a table names.
PACKAGES = (
    "torch", "accelerate", "lightning-fabric", "lightning", "torchao", "transformer-engine", "triton",
)  # fmt: skip
SCALES = {"us": 1e6, "ms": 1e3, "s": 1.0, "MB": 1e-6}


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """A limit for a contestant beside another, within the rounds of a table. A table tells it, nothing asserts it.

    Attributes:
        of: The contestant.
        beside: The other one.
        most: The largest ratio of the two; where `added`, the largest difference, in seconds or bytes.
        added: Whether it limits the difference.
    """

    of: str
    beside: str
    most: float
    added: bool = False

    def judge(self, measured: Mapping[str, Sequence[float]], unit: str) -> str:
        """Return the goal and what became of it, in one line."""
        scale, word = (SCALES[unit], f" {unit} more than") if self.added else (1.0, " x")
        goal = f"Goal: {self.of}: at most {self.most * scale:.3g}{word} {self.beside}"
        if not (measured.get(self.of) and measured.get(self.beside)):
            return f"{goal}: not measured"
        pairs = zip(measured[self.of], measured[self.beside], strict=True)
        found = statistics.median(own - other if self.added else own / other for own, other in pairs)
        return f"{goal}: {found * scale:.4g}, {'met' if found <= self.most else '**missed**'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """One comparison.

    Attributes:
        title: What is measured.
        unit: "us", "ms" or "s", what seconds are shown in; or "MB", what bytes are shown in.
        measured: Seconds or bytes of each contestant, one a round; the others are held against the first contestant.
        rates: What is done in the measured seconds, by the unit of the rate; each makes a column.
        goals: Limits that are told below the table.
        digits: Of a ratio, behind the point.
    """

    title: str
    unit: str
    measured: Mapping[str, Sequence[float]]
    rates: Mapping[str, float] = field(default_factory=dict[str, float])
    goals: Sequence[Goal] = ()
    digits: int = 2

    def __str__(self) -> str:
        scale = SCALES[self.unit]
        base, *_ = self.measured.values()
        base_name, *_ = self.measured
        lines = [
            f"**{self.title}**",
            "",
            f"| | median, {self.unit} | added, {self.unit} | ratio |"
            + "".join(f" {r} |" for r in self.rates),
            "|---|---:|---:|---:|" + "---:|" * len(self.rates),
        ]
        for name, times in self.measured.items():
            median = statistics.median(times) * scale
            # Differences and ratios within a round: what slows the machine for a while slows both.
            pairs = list(zip(times, base, strict=True))
            added = statistics.median(own - other for own, other in pairs) * scale
            ratio = statistics.median(own / other for own, other in pairs)
            compared = "| |" if name == base_name else f"{_short(added)} | {ratio:.{self.digits}f} |"
            rates = "".join(f" {_short(amount * scale / median)} |" for amount in self.rates.values())
            lines.append(f"| {name} | {_short(median)} | {compared}{rates}")
        goals = [goal.judge(self.measured, self.unit) for goal in self.goals]
        return "\n".join([*lines, *([""] if goals else []), *(f"- {goal}" for goal in goals)])


def take_turns(
    contestants: Mapping[str, Callable[[], float]],
    *,
    rounds: int,
    warmup: int = 1,
    shown: bool = True,
    within_seconds: float = math.inf,
    on_round: Callable[[Mapping[str, Sequence[float]]], object] | None = None,
) -> dict[str, list[float]]:
    """Run every contestant once a round, each round beginning with another one.

    Args:
        contestants: Functions that do their work and return the seconds it took.
        rounds: Rounds that count.
        warmup: Rounds before them that do not.
        shown: Whether each turn is shown on stderr as it ends.
        within_seconds: Once they have passed, no other round begins; one counts always.
        on_round: Called after each round that counts, with what was measured so far.

    Returns:
        The seconds of each contestant, one a round, in the contestants' order.
    """
    names = list(contestants)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    begin = time.perf_counter()
    for number in range(warmup + rounds):
        if number > warmup and time.perf_counter() - begin > within_seconds:
            break
        start = number % len(names)
        for name in names[start:] + names[:start]:
            taken = contestants[name]()
            if shown:
                print(
                    f"round {number} of {warmup + rounds - 1}: {name}: {taken:.4g} s",
                    file=sys.stderr,
                    flush=True,
                )
            if number >= warmup:
                seconds[name].append(taken)
        if number >= warmup and on_round is not None:
            on_round(seconds)
    return seconds


def repeated(
    call: Callable[[], object],
    *,
    times: int,
    before: Callable[[], object] | None = None,
    after: Callable[[], object] | None = None,
) -> Callable[[], float]:
    """A turn: the seconds of one call, over many.

    Args:
        call: What is timed.
        times: Calls in one turn.
        before: Called first and not timed, such as a barrier where ranks take the turn together.
        after: Called last and timed, such as the wait for a device to do what it was given.
    """

    def turn() -> float:
        if before is not None:
            before()
        start = time.perf_counter()
        for _ in range(times):
            call()
        if after is not None:
            after()
        return (time.perf_counter() - start) / times

    return turn


def report(name: str, tables: Sequence[Table], arguments: argparse.Namespace, *, note: str = "") -> None:
    """Print the tables, and write them to `arguments.results` with what they were measured on."""
    print(write(name, tables, arguments, note=note))


def write(name: str, tables: Sequence[Table], arguments: argparse.Namespace, *, note: str = "") -> str:
    """Write the tables to `arguments.results` with what they were measured on, and return the text."""
    heading = f"# {name}\n\n{_conditions(arguments)}\n" + (f"\n{note}\n" if note else "")
    text = "\n".join([heading, *(f"{table}\n" for table in tables)])
    arguments.results.mkdir(parents=True, exist_ok=True)
    (arguments.results / f"{name}.md").write_text(text)
    return text


def parse_arguments(description: str, *, rounds: int, only: str | None = None) -> argparse.Namespace:
    """The arguments that every benchmark has: --rounds, --results, and --worker for its own processes.

    Args:
        description: The script's docstring.
        rounds: Rounds that count, unless the command line says otherwise.
        only: The help of --only; None for a benchmark without it.
    """
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument(
        "--rounds", type=int, default=rounds, help="rounds that count, after one that does not"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder the table is written to")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    if only is not None:
        parser.add_argument("--only", default="", help=only)
    return parser.parse_args()


def found_by_ranks(num_ranks: int, *own: str, **environment: str) -> Any:
    """Run this script again as ranks under torch's own launcher, and return what rank 0 found.

    Args:
        num_ranks: The number of processes, a thread each.
        *own: The script's arguments, beside `--out FILE`, where rank 0 writes JSON.
        **environment: Variables of the processes.
    """
    with TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
        command = [sys.executable, *launcher, sys.argv[0], "--out", str(out), *own]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1", **environment})
        return json.loads(out.read_text())


def on_two_ranks(description: str, measure: Callable[[argparse.Namespace], None], *, rounds: int) -> None:
    """Run this script again as two ranks under torch's own launcher, which favours no contestant.

    Args:
        description: The script's docstring.
        measure: What each rank does.
        rounds: Rounds that count, unless the command line says otherwise.
    """
    arguments = parse_arguments(description, rounds=rounds)
    if arguments.worker:
        measure(arguments)
        return
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = [sys.argv[0], "--worker", "--rounds", str(arguments.rounds), "--results", str(arguments.results)]
    subprocess.run(
        [sys.executable, *launcher, *script], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )


def installed(package: str) -> bool:
    """Whether a peer is there; a table leaves out those that are not."""
    try:
        version(package)
    except PackageNotFoundError:
        print(f"{package} is not installed and left out; `uv run --group bench` brings it", file=sys.stderr)
        return False
    return True


def _conditions(arguments: argparse.Namespace) -> str:
    versions = ", ".join(f"{package} {version(package)}" for package in PACKAGES if _has(package))
    day = datetime.datetime.now(tz=datetime.UTC).date()
    return (
        f"{day}; {versions}; Python {platform.python_version()}; {_processor()}. Contestants took turns in "
        f"{arguments.rounds} rounds of one run; medians over rounds, differences and ratios within a round."
    )


def _has(package: str) -> bool:
    try:
        return bool(version(package))
    except PackageNotFoundError:
        return False


def _processor() -> str:
    names = [line.split(":", 1)[1].strip() for line in _cpuinfo() if line.startswith("model name")]
    return f"{os.cpu_count()} x {names[0] if names else platform.machine()}"


def _cpuinfo() -> list[str]:
    file = Path("/proc/cpuinfo")
    return file.read_text().splitlines() if file.exists() else []


def _short(number: float) -> str:
    return f"{number:,.0f}" if abs(number) >= 100 else f"{number:.3g}"
