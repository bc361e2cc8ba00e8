"""Find what would break a run, each with its repair."""

import json
import shutil
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

from drivetrain_config import Layers, environ
from drivetrain_doctor.checked_run import run_to_check
from drivetrain_doctor.examination import examine
from drivetrain_doctor.report.step_display import StepDisplay
from drivetrain_doctor.report.table import table
from drivetrain_launcher.errors import UsageError
from drivetrain_launcher.plan.host_detection import detect_host
from drivetrain_launcher.plan.resolved_launch import find_own_placement, resolve_launch
from drivetrain_launcher.run.output.terminals import coloured_outputs
from drivetrain_messages import argument, say

TOPIC = "Check"  # in `drivetrain --help`

_LONGEST_LINE = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorArguments:
    """The arguments of `drivetrain doctor`, besides those of launch."""

    folder: Path = argument(
        Path(),
        "Folder of the checkpoints; the doctor writes a file into it and removes it.",
        brief="Folder of the checkpoints",
    )
    num_workers: int = argument(4, "Workers of each process's DataLoader.", brief="Workers of a DataLoader")
    batch_megabytes: float | None = argument(
        None,
        "Size of a worker's batch in MB, to check that shared memory has room for its batches.",
        brief="Size of a worker's batch",
    )
    wait_seconds: float = argument(
        30.0,
        "Seconds that hosts wait for each other before the missing are named.",
        brief="Seconds to wait for hosts",
    )
    json: bool = argument(
        False, "Print JSON, for programs, with all measured numbers.", brief="Print JSON, for programs"
    )
    layers: Layers = field(default_factory=lambda: Layers({}), metadata={"finds_file": True})

    def __post_init__(self) -> None:
        """Check the folder and the numbers; a UsageError names the flag."""
        if not self.folder.exists() and not self.folder.absolute().parent.is_dir():
            raise UsageError(
                f"--folder {self.folder}: neither this folder nor its parent exists; name the checkpoints' folder"
            )
        if self.folder.exists() and not self.folder.is_dir():
            raise UsageError(f"--folder {self.folder}: this is a file; name the folder of the checkpoints")
        if self.num_workers < 0:
            raise UsageError(f"--num-workers {self.num_workers}: 0 or more is allowed")
        if self.batch_megabytes is not None and not 0 <= self.batch_megabytes < float("inf"):
            raise UsageError(f"--batch-megabytes {self.batch_megabytes}: 0 or more is allowed")
        if not 0 < self.wait_seconds < float("inf"):
            raise UsageError(f"--wait-seconds {self.wait_seconds}: a number of seconds above 0 is allowed")


def run(arguments: DoctorArguments) -> int:
    """Find what would break a run, on this host or on all; the flags of launch choose the run."""
    resolved = resolve_launch(arguments.layers, placement=find_own_placement(arguments.layers))
    batch = arguments.batch_megabytes
    checked = replace(
        run_to_check(resolved.launch, detect_host(resolved.device), resolved.placement),
        environment=environ.child_environment(),
        folder=arguments.folder,
        num_workers=arguments.num_workers,
        batch_bytes=None if batch is None else round(batch * 1e6),
        wait_seconds=arguments.wait_seconds,
    )
    for note in resolved.file_notes:
        say(note)
    if checked.is_idle:  # the first task of this host checks it
        return 0
    progress = StepDisplay(sys.stderr)
    try:
        examination = examine(checked, progress=progress)
    finally:
        progress.clear()
    if arguments.json:
        sys.stdout.write(f"{json.dumps(examination.as_data(), indent=2)}\n")
    else:
        is_coloured, _ = coloured_outputs(checked.environment)
        width = min(_LONGEST_LINE, shutil.get_terminal_size((100, 24)).columns)
        sys.stdout.write(table(examination, is_coloured=is_coloured, width=width))
        if not examination.is_leader:
            sys.stdout.write("The output of host 0 shows all hosts.\n")
    return int(examination.is_broken)
