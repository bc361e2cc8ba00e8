"""Findings as workflow commands, which GitHub shows at the lines of a pull request."""

from drivetrain_lint.checker import Report
from drivetrain_lint.finding import Finding


def as_github(report: Report) -> str:
    """Return one workflow command a finding."""
    return "".join(f"{_command(finding)}\n" for finding in report.findings)


def _command(finding: Finding) -> str:
    properties = {"file": finding.path}
    if finding.cell is None:
        properties |= {
            "line": str(finding.line),
            "col": str(finding.column),
            "endColumn": str(finding.end_column),
            "title": f"{finding.code} {finding.name}",
        }
    else:  # lines of a notebook's file are not those of its cells
        properties["title"] = f"{finding.code} {finding.name} (cell {finding.cell})"
    listed = ",".join(
        f"{name}={_escape(value).replace(':', '%3A').replace(',', '%2C')}"
        for name, value in properties.items()
    )
    message = f"{finding.what}. {finding.why} {finding.mend}".replace("..", ".")
    return f"::{finding.severity} {listed}::{_escape(message)}"


def _escape(text: str) -> str:
    """Escape a text as the runner unescapes it, so that a file name cannot end a property."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
