"""The tests and benchmarks of a card, in this environment: `tools/cuda/run.py`."""

import sys
from pathlib import Path

from checks.commands import shown
from checks.findings import Finding

_SECONDS = 1200


def check(root: Path, *, dry: bool = False) -> list[Finding]:
    """Run both halves.

    Args:
        root: The repository.
        dry: Play what needs no card.
    """
    command = [sys.executable, "tools/cuda/run.py", *(["--dry"] if dry else [])]
    return shown("cuda", command, cwd=root, timeout_seconds=_SECONDS)
