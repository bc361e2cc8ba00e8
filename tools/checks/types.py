"""pyright in strict mode."""

import json
from pathlib import Path

from checks.commands import SCRIPTS, captured
from checks.findings import Finding


def check(root: Path) -> list[Finding]:
    """Run pyright as pyproject.toml sets it up."""
    return type_findings(captured([str(SCRIPTS / "pyright"), "--outputjson"], cwd=root).stdout, root)


def type_findings(output: str, root: Path) -> list[Finding]:
    """Findings from `pyright --outputjson`; a warning counts like an error, and so does a run that read no file."""
    said = json.loads(output)
    if not said["summary"]["filesAnalyzed"]:
        return [
            Finding(where="pyproject.toml", message="pyright read no file: [tool.pyright] include names none")
        ]
    found: list[Finding] = []
    for entry in said["generalDiagnostics"]:
        path = Path(entry["file"])
        shown = path.relative_to(root) if path.is_relative_to(root) else path
        line = entry.get("range", {}).get("start", {}).get("line", 0) + 1
        rule = entry.get("rule", entry["severity"])
        found.append(
            Finding(
                where=f"{shown.as_posix()}:{line}", message=f"{' '.join(entry['message'].split())} ({rule})"
            )
        )
    return found
