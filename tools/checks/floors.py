"""import-linter: arrows point down only."""

from pathlib import Path

from checks.commands import SCRIPTS, captured, failure
from checks.findings import Finding


def check(root: Path) -> list[Finding]:
    """Hold the floors that pyproject.toml writes down."""
    return failure("import-linter", captured([str(SCRIPTS / "lint-imports"), "--no-logo"], cwd=root))
