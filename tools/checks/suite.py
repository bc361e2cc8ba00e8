"""The test command of the README."""

from pathlib import Path

from checks.commands import SCRIPTS, shown
from checks.findings import Finding


def check(root: Path) -> list[Finding]:
    """Run what `uv run pytest` runs."""
    return shown("pytest", [str(SCRIPTS / "pytest")], cwd=root, timeout_seconds=3600)
