"""The documentation: the site builds without a warning, and every code block of every page runs."""

import shutil
from pathlib import Path

from checks.commands import SCRIPTS, captured, failure, shown
from checks.findings import Finding


def build(root: Path) -> list[Finding]:
    """Build the site anew into docs/_build/html; each warning is a finding."""
    site = root / "docs" / "_build" / "html"
    shutil.rmtree(site, ignore_errors=True)
    command = [
        str(SCRIPTS / "sphinx-build"),
        "-W",
        "--keep-going",
        "-q",
        "-E",
        "-b",
        "html",
        "docs",
        str(site),
    ]
    finished = captured(command, cwd=root)
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
