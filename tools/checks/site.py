"""The documentation: the site builds without a warning, and every code block of every page runs."""

import shutil
from pathlib import Path

from checks.commands import SCRIPTS, captured, failure, shown
from checks.findings import Finding


def build(root: Path, *, is_fresh: bool = True, shows_progress: bool = False) -> list[Finding]:
    """Build the site into docs/_build/html; each warning is a finding.

    Args:
        root: The repository.
        is_fresh: Whether to build all pages anew; else those that changed, and only their warnings are found.
        shows_progress: Whether the terminal shows which page is read or written.
    """
    site = root / "docs" / "_build" / "html"
    command = [str(SCRIPTS / "sphinx-build"), "-W", "--keep-going", "-j", "auto", "-b", "html"]
    if is_fresh:
        shutil.rmtree(site, ignore_errors=True)
        command.append("-E")
    if not shows_progress:
        command.append("-q")
    finished = captured([*command, "docs", str(site)], cwd=root, shows_output=shows_progress)
    warnings = [Finding(where="sphinx", message=line) for line in warning_lines(finished.stderr)]
    return warnings or failure("sphinx", finished)


def check(root: Path) -> list[Finding]:
    """Build the site, then run the code blocks of the docs and of every README."""
    pages = [
        "docs",
        "README.md",
        *sorted(str(page.relative_to(root)) for page in root.glob("packages/*/README.md")),
    ]
    command = [str(SCRIPTS / "pytest"), "-q", *(page for page in pages if (root / page).exists())]
    return [*build(root), *shown("code blocks", command, cwd=root, timeout_seconds=1200)]


def warning_lines(output: str) -> list[str]:
    """What sphinx-build complained about, a line a complaint."""
    return [line.strip() for line in output.splitlines() if "WARNING: " in line or "ERROR: " in line]
