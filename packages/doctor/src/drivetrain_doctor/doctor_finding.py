"""The findings of checks, as values that a test, a table and JSON can show."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

# "error" will break a run, "warning" may slow it or break a larger one.
Severity = Literal["error", "warning"]
State = Literal["ok", "warning", "error", "skipped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorFinding:
    """Something that breaks runs or slows them.

    Attributes:
        severity: "error" if it will break a run, else "warning".
        what: The fault, with the measured value.
        why: The effect on a run.
        repair: The command to run or the setting to change.
        measured: The numbers and names behind the finding, for programs.
    """

    severity: Severity
    what: str
    why: str
    repair: str
    measured: Mapping[str, float | str] = field(default_factory=dict[str, float | str])


@dataclass(slots=True)
class CheckReport:
    """The judgement on one measurement, with a few words to show even if nothing is wrong.

    The summary of a skipped check is the reason why nothing could be measured.
    """

    name: str = field(default="", kw_only=True)
    summary: str = ""
    is_skipped: bool = field(default=False, kw_only=True)
    findings: list[DoctorFinding] = field(default_factory=list[DoctorFinding], kw_only=True)
    seconds: float = field(default=0.0, kw_only=True)

    @property
    def state(self) -> State:
        """The severity of the worst finding; "skipped" if nothing was measured."""
        if self.findings:
            return min(finding.severity for finding in self.findings)  # "error" before "warning"
        return "skipped" if self.is_skipped else "ok"

    def error(self, what: str, *, why: str, repair: str, **measured: float | str) -> None:
        """Add a finding that will break a run."""
        self.findings.append(
            DoctorFinding(severity="error", what=what, why=why, repair=repair, measured=measured)
        )

    def warning(self, what: str, *, why: str, repair: str, **measured: float | str) -> None:
        """Add a finding that may slow a run, or break a larger one."""
        self.findings.append(
            DoctorFinding(severity="warning", what=what, why=why, repair=repair, measured=measured)
        )

    def as_data(self) -> dict[str, Any]:
        """Return the report as plain JSON data."""
        return {**asdict(self), "state": self.state}

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> "CheckReport":
        """Return the report that `as_data` wrote."""
        plain = {name: value for name, value in data.items() if name not in ("state", "findings")}
        return cls(**plain, findings=[DoctorFinding(**finding) for finding in data["findings"]])


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A check with a short name. An OSError from `run` means that the measurement was not possible."""

    name: str
    run: Callable[[], CheckReport]


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """The findings of the doctor.

    Attributes:
        hosts: The label and the reports of each host; hosts other than 0 have only their own.
        together: The reports on all hosts together; present on host 0, or if this host could not join.
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
