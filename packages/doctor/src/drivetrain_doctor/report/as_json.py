"""The findings as plain JSON data, for programs."""

from typing import Any

from drivetrain_doctor.examination import Examination


def as_json(examination: Examination) -> dict[str, Any]:
    """Return all that was found as plain JSON data, with what was measured."""
    return {
        "num_nodes": examination.num_nodes,
        "num_processes": examination.num_processes,
        "seconds": round(examination.seconds, 3),
        "is_broken": examination.is_broken,
        "hosts": [
            {"host": label, "checks": [report.as_data() for report in reports]}
            for label, reports in examination.hosts
        ],
        "together": [report.as_data() for report in examination.together],
    }
