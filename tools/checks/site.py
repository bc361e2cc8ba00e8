"""The documentation: the site builds without a warning, and every code block of every page runs."""

from pathlib import Path

from checks.commands import SCRIPTS, captured, shown
from checks.findings import Finding


def build(root: Path) -> list[Finding]:
    """Build the site into docs/_build/html; each warning is a finding."""
    command = [str(SCRIPTS / "sphinx-build"), "-W", "--keep-going", "-q", "-E", "-b", "html", "docs"]
    finished = captured([*command, "docs/_build/html"], cwd=root)
    if not finished.returncode:
        return []
    return [Finding(where="sphinx", message=line) for line in warning_lines(finished.stderr)]


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
    """What sphinx-build complained about, without its closing line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return [line for line in lines if not line.startswith("build finished with problems")]
