"""The findings of checks, as frozen values that a test, a table and JSON can show."""

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
        mend: The command to run or the setting to change.
        measured: The numbers and names behind it, for programs.
    """

    severity: Severity
    what: str
    why: str
    mend: str
    measured: Mapping[str, float | str] = field(default_factory=dict[str, float | str])


@dataclass(slots=True)
class CheckVerdict:
    """The judgement on one measurement, with a few words to show even if nothing is wrong.

    `skipped` is the reason why nothing could be measured; None if it was.
    """

    summary: str = ""
    skipped: str | None = None
    findings: list[DoctorFinding] = field(default_factory=list[DoctorFinding])

    def error(self, what: str, *, why: str, mend: str, **measured: float | str) -> None:
        """Add a finding that will break a run."""
        self.findings.append(
            DoctorFinding(severity="error", what=what, why=why, mend=mend, measured=measured)
        )

    def warning(self, what: str, *, why: str, mend: str, **measured: float | str) -> None:
        """Add a finding that may slow a run, or break a larger one."""
        self.findings.append(
            DoctorFinding(severity="warning", what=what, why=why, mend=mend, measured=measured)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A check by its short name. An OSError from `run` means that the measurement was not possible."""

    name: str
    run: Callable[[], CheckVerdict]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """The report of one check. The summary of a skipped check is the reason."""

    name: str
    summary: str
    is_skipped: bool = False
    findings: tuple[DoctorFinding, ...] = ()
    seconds: float = 0.0

    @property
    def state(self) -> State:
        """The worst of the findings; "skipped" if nothing was measured."""
        if self.findings:
            return min(finding.severity for finding in self.findings)  # "error" before "warning"
        return "skipped" if self.is_skipped else "ok"

    def as_data(self) -> dict[str, Any]:
        """Return the report as plain JSON data."""
        return {**asdict(self), "state": self.state}

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> "CheckReport":
        """Return the report that `as_data` wrote."""
        plain = {name: value for name, value in data.items() if name not in ("state", "findings")}
        return cls(**plain, findings=tuple(DoctorFinding(**finding) for finding in data["findings"]))
