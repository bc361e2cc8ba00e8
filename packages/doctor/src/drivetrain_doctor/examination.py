"""Check this host, and all hosts together if the run has several."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

from drivetrain_doctor.checked_run import CheckedRun
from drivetrain_doctor.doctor_finding import Examination
from drivetrain_doctor.host.addresses import find_outgoing_address
from drivetrain_doctor.host.host_checks import PROGRAM_SECONDS, host_checks, program_checks
from drivetrain_doctor.links.link_measurement import start_pairs
from drivetrain_doctor.run_checks import run_checks


def examine(checked: CheckedRun, *, progress: Callable[[str], None]) -> Examination:
    """Run all checks, and call `progress` with each step. In a run on several hosts, every host calls this."""
    begin = time.monotonic()
    with ExitStack() as stack:
        # They import torch while the checks of this host run.
        between_hosts, between_ranks = (
            stack.enter_context(start_pairs(checked.environment)) if count > 1 else None
            for count in (checked.num_nodes, checked.processes_per_node)
        )
        reports = run_checks(host_checks(checked), progress=progress)
        checks = program_checks(checked, between_ranks)
        reports += run_checks(checks, progress=progress, limit_seconds=PROGRAM_SECONDS)
        result = Examination(
            num_nodes=checked.num_nodes,
            num_processes=checked.world_size,
            hosts=(("this host", reports),),
            is_broken=any(report.state == "error" for report in reports),
        )
        if between_hosts is not None:
            # It imports torch, which a single host does not need in this process.
            from drivetrain_doctor.meeting.joint_checks import meet

            address = find_outgoing_address(checked.master_addr)
            result = meet(checked, result, address=address, program=between_hosts, progress=progress)
    return replace(result, seconds=time.monotonic() - begin)
