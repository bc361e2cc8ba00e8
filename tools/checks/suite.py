"""The test command of the README, whole or for a change."""

from pathlib import Path

from checks.commands import SCRIPTS, shown
from checks.findings import Finding
from checks.reach import changed_files, reached_tests


def check(root: Path, base: str | None = None) -> list[Finding]:
    """Run what `uv run pytest` runs.

    Args:
        root: The repository.
        base: Only the tests that the changes since this commit can reach; None for all.
    """
    chosen: list[str] = []
    if base is not None and (tests := reached_tests(root, changed_files(root, base))) is not None:
        if not tests:
            print(f"no test can be reached by what changed since {base}")
            return []
        chosen = [str(file.relative_to(root)) for file in tests]
        print(f"{len(chosen)} files of tests and pages can be reached by what changed since {base}")
    return shown("pytest", [str(SCRIPTS / "pytest"), *chosen], cwd=root, timeout_seconds=3600)
