"""Findings as workflow commands, which GitHub shows at the lines of a pull request."""

from drivetrain_lint.checker import Report
from drivetrain_lint.finding import Finding, Severity

_COMMANDS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "notice"}


def as_github(report: Report) -> str:
    """Return one workflow command a finding."""
    return "".join(f"{_command(finding)}\n" for finding in report.findings)


def _command(finding: Finding) -> str:
    properties = {
        "file": finding.path,
        "line": str(finding.line),
        "col": str(finding.column),
        "endColumn": str(finding.end_column),
        "title": f"{finding.code} {finding.name}",
    }
    if finding.cell is not None:  # lines of a notebook's file are not those of its cells
        properties = {"file": finding.path, "title": f"{finding.code} {finding.name} (cell {finding.cell})"}
    # Escaped as the runner unescapes it, so that a file name cannot end a property.
    escaped = {
        name: _data(value).replace(":", "%3A").replace(",", "%2C") for name, value in properties.items()
    }
    listed = ",".join(f"{name}={value}" for name, value in escaped.items())
    message = f"{finding.what}. {finding.why} {finding.mend}".replace("..", ".")
    return f"::{_COMMANDS[finding.severity]} {listed}::{_data(message)}"


def _data(text: str) -> str:
    """Escape a message as the runner unescapes it."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
