"""Run a script under the real Accelerate and under drivetrain for a few steps, and compare its losses."""

import json
import subprocess
import sys
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import torch

from drivetrain_accelerate.commands.comparison.loss_table import rows_of, table_of
from drivetrain_config import environ
from drivetrain_launcher.errors import LaunchError

_RECORDED = "drivetrain_accelerate.commands.comparison.recorded_run"
_LAST_LINES = 15
_WHY = (
    "a loader that shuffles reads in drivetrain's own order, the same on any number of processes: compare with "
    "shuffle=False; of what else differs by intention, docs/howto/drop_in.md has a table\n"
)

Side = Literal["real", "ours"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonArguments:
    """The arguments of `drivetrain accelerate check`."""

    script: str = field(
        metadata={"positional": True, "help": "Script to run; a module's name with --module."}
    )
    arguments: tuple[str, ...] = field(
        default=(), metadata={"rest": True, "help": "The script's own arguments, handed to it untouched."}
    )
    steps: int = field(default=5, metadata={"help": "Number of losses after which the script is ended."})
    tolerance: float = field(
        default=1e-4, metadata={"help": "Largest difference of two losses, as a fraction of the larger one."}
    )
    num_processes: int = field(default=1, metadata={"help": "Number of processes of each run."})
    module: bool = field(default=False, metadata={"help": "Whether the script is the name of a module."})
    timeout_seconds: float = field(default=600.0, metadata={"help": "Seconds that each run may take."})

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


def run(arguments: ComparisonArguments) -> int:
    """Run a script under the real Accelerate and under drivetrain for a few steps, and compare its losses.

    Returns:
        The exit code: 1 if losses differ, or a run fails.
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
    different = [row for row in rows if not row.is_same(arguments.tolerance)]
    count = f"{len(different)} of {len(rows)} losses differ"
    verdict = count if different else f"all {len(rows)} losses are the same"
    sys.stdout.write(
        f"{table_of(rows, arguments.tolerance)}\n{verdict} (tolerance {arguments.tolerance:g})\n"
    )
    if different:
        sys.stdout.write(_WHY)
    return 1 if different else 0


def _losses(side: Side, arguments: ComparisonArguments) -> list[list[float]] | None:
    """Run the script on one side, and return the losses of each rank; None if it fails, which is told."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / side
        command = _command(side, file, arguments)
        try:
            done = subprocess.run(
                command,
                env=environ.child_environment(**_without_ranks(), **_on_cpu(arguments.num_processes)),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=arguments.timeout_seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            sys.stderr.write(f"{_title(side)}: has not ended after {arguments.timeout_seconds:g} s\n")
            return None
        if done.returncode:
            tail = "\n".join((done.stdout + done.stderr).splitlines()[-_LAST_LINES:])
            sys.stderr.write(f"{_title(side)}: ended with exit code {done.returncode}\n{tail}\n")
            return None
        return [
            [json.loads(line) for line in Path(f"{file}.{rank}").read_text(encoding="utf-8").splitlines()]
            for rank in range(arguments.num_processes)
        ]


def _command(side: Side, file: Path, arguments: ComparisonArguments) -> list[str]:
    start = [sys.executable]
    if arguments.num_processes > 1:
        ranks = str(arguments.num_processes)
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
    dash_m = ["-m"] if arguments.module else []
    recorded = ["-m", _RECORDED, side, str(file), str(arguments.steps)]
    return [*start, *recorded, *dash_m, arguments.script, *arguments.arguments]


def _without_ranks() -> dict[str, None]:
    """Return the variables of a launcher around this process, to be removed: each run has ranks of its own."""
    return dict.fromkeys(
        ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    )


def _on_cpu(num_processes: int) -> dict[str, str]:
    """Return the variable by which processes form a group on a machine without accelerators.

    Without it, the real Accelerate has each of them train alone there, unless the script itself says `cpu=True`.
    """
    return {} if num_processes == 1 or torch.accelerator.is_available() else {"ACCELERATE_USE_CPU": "true"}


def _title(side: Side) -> str:
    return "the real Accelerate" if side == "real" else "drivetrain"
