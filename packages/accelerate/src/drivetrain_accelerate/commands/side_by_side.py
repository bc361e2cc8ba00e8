"""Compare a script's losses under Accelerate and drivetrain.

As a program with the arguments (real | ours) FILE STEPS (SCRIPT | -m MODULE) ..., this module runs one side and
writes each loss of a rank as a line of FILE.RANK.
"""

import json
import math
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import wraps
from importlib import import_module
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
import torch

from drivetrain_accelerate.installation import install
from drivetrain_config import environ
from drivetrain_launcher.errors import LaunchError
from drivetrain_launcher.run.runpy_main import run_as_main
from drivetrain_messages import argument, format_table

_THIS = "drivetrain_accelerate.commands.side_by_side"
_LAST_LINES = 15
_WHY = (
    "a loader that shuffles reads in drivetrain's own order, the same on any number of processes: compare with "
    "shuffle=False; of what else differs by intention, docs/howto/drop_in.md has a table\n"
)
# The variables of a launcher around this process: each run has ranks of its own.
_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_TITLES = {"real": "the real Accelerate", "ours": "drivetrain"}

Side = Literal["real", "ours"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonArguments:
    """The arguments of `drivetrain accelerate check`."""

    script: str = argument(..., "Script to run; a module's name with --module.", positional=True)
    arguments: tuple[str, ...] = argument(
        (), "The script's own arguments, handed to it untouched.", rest=True
    )
    steps: int = argument(5, "Number of losses after which the script is ended.")
    tolerance: float = argument(1e-4, "Largest difference of two losses, as a fraction of the larger one.")
    num_processes: int = argument(1, "Number of processes of each run.")
    module: bool = argument(False, "Whether the script is the name of a module.")
    timeout_seconds: float = argument(600.0, "Seconds that each run may take.")

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name in ("steps", "num_processes"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} {getattr(self, name)}: must be at least 1")
        for name in ("tolerance", "timeout_seconds"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(
                    f"--{name.replace('_', '-')} {getattr(self, name)}: must be above 0, and finite"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class LossRow:
    """The two losses of a rank at one step, counted from 1: Accelerate's and drivetrain's; None after a run's end."""

    rank: int
    step: int
    real: float | None
    ours: float | None

    def is_same(self, tolerance: float) -> bool:
        """Return whether both runs have a loss, and the losses differ by at most this fraction of the larger loss."""
        if self.real is None or self.ours is None:
            return False
        if math.isnan(self.real) and math.isnan(self.ours):
            return True
        return math.isclose(self.real, self.ours, rel_tol=tolerance, abs_tol=tolerance * 1e-3)


def run(arguments: ComparisonArguments) -> int:
    """Run a script under the real Accelerate and under drivetrain for a few steps, and compare its losses.

    The exit code is 1 if losses differ, or a run fails.
    """
    if find_spec("accelerate") is None:
        raise LaunchError("accelerate check: the real Accelerate is not installed; pip install accelerate")
    if not arguments.module and not Path(arguments.script).is_file():
        raise LaunchError(
            f"{arguments.script}: no such script (looked for {Path(arguments.script).absolute()})"
        )
    real, ours = (_losses(side, arguments) for side in ("real", "ours"))
    if real is None or ours is None:
        return 1
    rows = rows_of(real, ours)
    if not rows:
        sys.stdout.write("neither run called accelerator.backward: there is nothing to compare\n")
        return 1
    num_different = sum(not row.is_same(arguments.tolerance) for row in rows)
    verdict = f"all {len(rows)} losses are the same"
    if num_different:
        verdict = f"{num_different} of {len(rows)} losses differ"
    sys.stdout.write(
        f"{table_of(rows, arguments.tolerance)}\n{verdict} (tolerance {arguments.tolerance:g})\n"
    )
    if num_different:
        sys.stdout.write(_WHY)
    return 1 if num_different else 0


def _losses(side: Side, arguments: ComparisonArguments) -> list[list[float]] | None:
    """Run the script on one side, and return each rank's losses. If it fails, print a message and return None."""
    num_processes, variables = arguments.num_processes, dict[str, str]()
    command = [sys.executable]
    if num_processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_processes)]
        if not torch.accelerator.is_available():
            # Else each process of the real Accelerate trains alone there, unless the script itself says `cpu=True`.
            variables["ACCELERATE_USE_CPU"] = "true"
    with TemporaryDirectory() as folder:
        file = Path(folder) / side
        command += ["-m", _THIS, side, str(file), str(arguments.steps)]
        command += [*(["-m"] if arguments.module else []), arguments.script, *arguments.arguments]
        try:
            done = subprocess.run(
                command,
                env=environ.child_environment(**dict.fromkeys(_RANKS), **variables),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=arguments.timeout_seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            sys.stderr.write(f"{_TITLES[side]}: has not ended after {arguments.timeout_seconds:g} s\n")
            return None
        if done.returncode:
            tail = "\n".join((done.stdout + done.stderr).splitlines()[-_LAST_LINES:])
            sys.stderr.write(f"{_TITLES[side]}: ended with exit code {done.returncode}\n{tail}\n")
            return None
        return [
            [json.loads(line) for line in Path(f"{file}.{rank}").read_text(encoding="utf-8").splitlines()]
            for rank in range(num_processes)
        ]


def rows_of(real: Sequence[Sequence[float]], ours: Sequence[Sequence[float]]) -> list[LossRow]:
    """Return a row for each step and rank, from the losses of each rank in both runs."""
    return [
        LossRow(rank=rank, step=step, real=theirs, ours=mine)
        for rank, sides in enumerate(zip(real, ours, strict=True))
        for step, (theirs, mine) in enumerate(zip_longest(*sides), start=1)
    ]


def table_of(rows: Sequence[LossRow], tolerance: float) -> str:
    """Return the rows as a table, and mark rows whose losses differ."""
    has_ranks = any(row.rank for row in rows)
    cells = [["rank", "step", "real", "ours", "difference", ""]]
    for row in rows:
        losses = ["none" if loss is None else f"{loss:.8g}" for loss in (row.real, row.ours)]
        difference = "" if row.real is None or row.ours is None else f"{row.ours - row.real:+.2e}"
        mark = "" if row.is_same(tolerance) else "differs"
        cells.append([str(row.rank), str(row.step), *losses, difference, mark])
    shown = cells if has_ranks else [line[1:] for line in cells]
    return format_table(shown, right=range(len(shown[0])))


def main() -> None:
    """Run the program that the command line names, record its losses, and end it after the last step."""
    side, file, steps, *program = sys.argv[1:]
    path = Path(f"{file}.{environ.read('RANK') or '0'}")
    path.touch()
    if side == "ours":
        install()
    # What a program may draw from without a seed of its own is the same on both sides.
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    accelerator: Any = import_module("accelerate").Accelerator
    backward, num_left = accelerator.backward, int(steps)

    @wraps(backward)
    def recorded(self: object, loss: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal num_left
        value = float(torch.as_tensor(loss).detach().float())
        result = backward(self, loss, *args, **kwargs)
        with path.open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps(value)}\n")
        num_left -= 1
        if num_left == 0:
            sys.stdout.flush()
            raise SystemExit(0)
        return result

    accelerator.backward = recorded
    is_module = program[:1] == ["-m"]
    name, *arguments = program[is_module:]
    run_as_main(name, arguments, is_module=is_module)


if __name__ == "__main__":
    main()
