"""Checks of each host, of all hosts together, and of their links, to find faults that break runs within seconds.

`run_to_check` derives the run from a launch's settings; `examine` checks the hosts for it. `host` measures and judges
one host, `meeting` all hosts over a store, `links` pairs of ranks; `report` shows the findings.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from drivetrain_doctor.checked_run import CheckedRun as CheckedRun
    from drivetrain_doctor.checked_run import run_to_check as run_to_check
    from drivetrain_doctor.doctor_finding import DoctorFinding as DoctorFinding
    from drivetrain_doctor.doctor_finding import Examination as Examination
    from drivetrain_doctor.examination import examine as examine
    from drivetrain_doctor.links.link_faults import LinkFaults as LinkFaults
    from drivetrain_doctor.links.link_faults import find_faults as find_faults

# Module -> its public names.
_NAMES = {
    "checked_run": "CheckedRun run_to_check",
    "doctor_finding": "DoctorFinding Examination",
    "examination": "examine",
    "links.link_faults": "find_faults LinkFaults",
}

if not TYPE_CHECKING:  # else a type checker would accept any name
    from drivetrain_messages.lazy_names import lazy_names as _lazy_names

    __all__, __getattr__, __dir__ = _lazy_names(__name__, _NAMES)
