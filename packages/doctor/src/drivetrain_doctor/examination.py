"""Check this host, and with several hosts all of them together."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from drivetrain_doctor.checked_run import CheckedRun
from drivetrain_doctor.doctor_finding import CheckReport
from drivetrain_doctor.host.addresses import find_outgoing_address
from drivetrain_doctor.host.host_checks import PROGRAM_SECONDS, host_checks, program_checks
from drivetrain_doctor.links.link_measurement import start_pairs
from drivetrain_doctor.run_checks import run_checks


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """The findings of the doctor.

    Attributes:
        hosts: The label of each host, and the reports of its own checks; on hosts other than 0 only this one.
        together: The reports on all hosts together; on host 0, or if this host could not join.
        is_broken: Whether a finding, on any host, will break a run.
        is_leader: Whether this host shows the findings of all.
    """

    num_nodes: int
    num_processes: int
    hosts: tuple[tuple[str, tuple[CheckReport, ...]], ...]
    together: tuple[CheckReport, ...] = ()
    is_broken: bool = False
    is_leader: bool = True
    seconds: float = 0.0

    def as_data(self) -> dict[str, Any]:
        """Return the findings and the measured numbers as plain JSON data."""
        return {
            "num_nodes": self.num_nodes,
            "num_processes": self.num_processes,
            "seconds": round(self.seconds, 3),
            "is_broken": self.is_broken,
            "hosts": [
                {"host": label, "checks": [report.as_data() for report in reports]}
                for label, reports in self.hosts
            ],
            "together": [report.as_data() for report in self.together],
        }


def examine(checked: CheckedRun, *, progress: Callable[[str], None]) -> Examination:
    """Run all checks, and call `progress` with what happens now. On several hosts, called on all of them."""
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
        hosts, together, is_leader = (("this host", reports),), (), True
        is_broken = any(report.state == "error" for report in reports)
        if between_hosts is not None:
            # It imports torch, which a single host does not need in this process.
            from drivetrain_doctor.meeting.joint_checks import meet

            address = find_outgoing_address(checked.master_addr)
            result = meet(checked, reports, address=address, program=between_hosts, progress=progress)
            hosts = tuple((result.labels[rank], found) for rank, found in sorted(result.reports.items()))
            together, is_leader = result.together, not result.rank
            is_broken = is_broken or result.is_broken
    return Examination(
        num_nodes=checked.num_nodes,
        num_processes=checked.world_size,
        hosts=hosts,
        together=together,
        is_broken=is_broken,
        is_leader=is_leader,
        seconds=time.monotonic() - begin,
    )
