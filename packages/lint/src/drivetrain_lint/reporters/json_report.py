"""Findings as one JSON object, for programs."""

import json
from dataclasses import asdict

from drivetrain_lint.checker import Report


def as_json(report: Report) -> str:
    """Return the findings, and how many there are of each severity, as JSON."""
    content = {
        "files": report.num_files,
        "counts": report.counts,
        "findings": [asdict(finding) for finding in report.findings],
    }
    return f"{json.dumps(content, indent=2)}\n"
