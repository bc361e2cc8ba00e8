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
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}

if not TYPE_CHECKING:  # else a type checker would accept any name
    __all__ = sorted(_MODULES)

    def __getattr__(name: str) -> object:
        if name in _MODULES:
            from importlib import import_module

            return getattr(import_module(f"drivetrain_doctor.{_MODULES[name]}"), name)
        raise AttributeError(f"module 'drivetrain_doctor' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return __all__
