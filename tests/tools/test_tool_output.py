import json
from pathlib import Path

from checks.commands import captured, failure
from checks.site import warning_lines
from checks.style import format_findings, rule_findings
from checks.types import type_findings

ROOT = Path("/repository")


def test_ruffs_findings_carry_file_line_and_rule() -> None:
    entry = {"filename": "/repository/a/b.py", "location": {"row": 7}, "code": "F401", "message": "unused"}
    [finding] = rule_findings(json.dumps([entry]), ROOT)
    assert str(finding) == "a/b.py:7: F401 unused"
    assert rule_findings("[]", ROOT) == []


def test_files_that_ruff_would_reformat_are_findings() -> None:
    assert [
        f.where for f in format_findings("Would reformat: a.py\nWould reformat: b.py\n2 files would be")
    ] == ["a.py", "b.py"]
    assert format_findings("12 files already formatted\n") == []


def pyright_said(files: int, *entries: dict[str, object]) -> str:
    return json.dumps({"summary": {"filesAnalyzed": files}, "generalDiagnostics": entries})


def test_pyrights_findings_carry_file_line_and_rule() -> None:
    entry = {
        "file": "/repository/a.py",
        "severity": "error",
        "message": "no such name",
        "rule": "reportX",
        "range": {"start": {"line": 4}},
    }
    [finding] = type_findings(pyright_said(1, entry), ROOT)
    assert str(finding) == "a.py:5: no such name (reportX)"
    assert type_findings(pyright_said(1), ROOT) == []


def test_a_pyright_that_read_nothing_is_a_finding() -> None:
    [finding] = type_findings(pyright_said(0), ROOT)
    assert "read no file" in finding.message


def test_sphinx_warnings_are_told_without_its_closing_line() -> None:
    output = "docs/a.md:3: WARNING: broken\n\nbuild finished with problems, 1 warning (as errors).\n"
    assert warning_lines(output) == ["docs/a.md:3: WARNING: broken"]


def test_a_failed_command_is_a_finding_with_its_output(tmp_path: Path) -> None:
    assert failure("tool", captured(["true"], cwd=tmp_path)) == []
    [finding] = failure("tool", captured(["sh", "-c", "echo broken; exit 3"], cwd=tmp_path))
    assert str(finding) == "tool: exit code 3\nbroken"
