"""What was found as plain JSON data, for programs."""

from typing import Any

from drivetrain_launcher.doctor.doctor import Diagnosis


def as_json(diagnosis: Diagnosis) -> dict[str, Any]:
    """Return all that was found as plain JSON data, with what was measured."""
    return {
        "num_nodes": diagnosis.num_nodes,
        "num_processes": diagnosis.num_processes,
        "seconds": round(diagnosis.seconds, 3),
        "is_broken": diagnosis.is_broken,
        "hosts": [
            {"host": label, "checks": [report.as_data() for report in reports]}
            for label, reports in diagnosis.hosts
        ],
        "together": [report.as_data() for report in diagnosis.together],
    }
