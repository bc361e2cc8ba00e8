"""The checks of one host, in the order in which they run."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from drivetrain_doctor.checked_run import CheckedRun
from drivetrain_doctor.doctor_finding import Check, CheckReport
from drivetrain_doctor.host.addresses import judge_addresses, measure_addresses
from drivetrain_doctor.host.checkpoint_disk import judge_disk, measure_disk
from drivetrain_doctor.host.gpus import GpuMeasurement, find_gpus, judge_driver, judge_peers, measure_gpus
from drivetrain_doctor.host.limits import judge_limits, measure_limits
from drivetrain_doctor.host.ports import judge_port, measure_port
from drivetrain_doctor.host.processors import judge_processors, measure_processors
from drivetrain_doctor.host.shared_memory_folder import judge_shared_memory, measure_shared_memory
from drivetrain_doctor.host.variables import judge_variables, measure_variables
from drivetrain_doctor.links.link_measurement import PairOrder, PairProgram, start_pairs
from drivetrain_doctor.links.link_results import judge_ranks
from drivetrain_launcher.plan.host_detection import accelerator_may_exist

_GPU_SECONDS = 60.0
_PAIR_SECONDS = 30.0

# Checks that start programs, which import torch.
PROGRAM_SECONDS = 150.0


def host_checks(checked: CheckedRun) -> tuple[Check, ...]:
    """Return the checks of this host that take milliseconds to two seconds each."""
    return (
        Check(name="variables", run=lambda: judge_variables(measure_variables(checked), checked)),
        Check(name="addresses", run=lambda: judge_addresses(measure_addresses(checked), checked)),
        Check(name="port", run=lambda: judge_port(measure_port(checked), checked)),
        Check(name="limits", run=lambda: judge_limits(measure_limits(), checked)),
        Check(name="shared memory", run=lambda: judge_shared_memory(measure_shared_memory(), checked)),
        Check(name="processors", run=lambda: judge_processors(measure_processors(), checked)),
        Check(name="checkpoint disk", run=lambda: judge_disk(measure_disk(checked), checked)),
    )


def program_checks(checked: CheckedRun, program: PairProgram | None) -> tuple[Check, ...]:
    """Return the checks of this host that need torch: checks of GPUs, and of the ranks that would run here.

    `program`, already started, measures pairs of ranks; None for a single rank.
    """

    @cache
    def gpus() -> GpuMeasurement:
        found = find_gpus()
        if not accelerator_may_exist():
            return found
        measured = measure_gpus(checked.environment, timeout_seconds=_GPU_SECONDS)
        return replace(measured, on_bus=found.on_bus)

    checks = [
        Check(name="GPU driver", run=lambda: judge_driver(gpus())),
        Check(name="GPU peer-to-peer", run=lambda: judge_peers(gpus())),
        Check(name="gloo between ranks", run=lambda: _measure_pairs(checked, "gloo", program)),
    ]
    if checked.accelerator == "cuda":
        checks.append(Check(name="nccl between ranks", run=lambda: _measure_pairs(checked, "nccl", None)))
    return tuple(checks)


def _measure_pairs(checked: CheckedRun, backend: str, program: PairProgram | None) -> CheckReport:
    """Measure the pairs of ranks of this host."""
    count = checked.processes_per_node
    if count < 2:
        return CheckReport("needs two ranks (--num-processes 2)", is_skipped=True)
    with (
        TemporaryDirectory(prefix="drivetrain-doctor-") as folder,
        program or start_pairs(checked.environment) as started,
    ):
        order = PairOrder(
            backend=backend,
            world_size=count,
            ranks=list(range(count)),
            store_path=str(Path(folder) / "store"),
            limit_seconds=_PAIR_SECONDS,
        )
        return judge_ranks(started.measure(order))
