"""ruff: its rules, and its formatting."""

import json
from pathlib import Path

from checks.commands import SCRIPTS, captured
from checks.findings import Finding


def check(root: Path) -> list[Finding]:
    """Run ruff's linter and formatter over the whole repository, changing nothing."""
    linted = captured([str(SCRIPTS / "ruff"), "check", "--output-format", "json", "."], cwd=root)
    formatted = captured([str(SCRIPTS / "ruff"), "format", "--check", "."], cwd=root)
    return [*rule_findings(linted.stdout, root), *format_findings(formatted.stdout)]


def rule_findings(output: str, root: Path) -> list[Finding]:
    """Findings from `ruff check --output-format json`."""
    found: list[Finding] = []
    for entry in json.loads(output):
        path = Path(entry["filename"])
        shown = path.relative_to(root) if path.is_relative_to(root) else path
        place = f"{shown.as_posix()}:{entry['location']['row']}"
        found.append(Finding(where=place, message=f"{entry['code']} {entry['message']}"))
    return found


def format_findings(output: str) -> list[Finding]:
    """Findings from `ruff format --check`."""
    marker = "Would reformat: "
    files = [line.removeprefix(marker) for line in output.splitlines() if line.startswith(marker)]
    return [Finding(where=file, message="not formatted: uv run ruff format") for file in files]
