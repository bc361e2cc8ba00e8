"""The questions of `drivetrain config` about checkpoints, with recommended answers; torch is not imported."""

from collections.abc import Mapping
from typing import Any


def ask_keep_last(known: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Ask how many checkpoints to keep, if the run has a folder for checkpoints."""
    if known.get("run.project_dir") is None and known.get("checkpoint.directory") is None:
        return None
    return {
        "value": 3,
        "why": "a checkpoint of a large model fills a disk soon, and older ones help if the newest is of no use",
        "text": "How many of the newest checkpoints are kept (none: all)?",
    }
