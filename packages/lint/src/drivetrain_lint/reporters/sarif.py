"""Findings as SARIF 2.1.0, the format of static analysis results that code hosts and editors read."""

import json
from pathlib import Path
from typing import Any
from urllib.parse import quote

from drivetrain_lint.checker import UNREADABLE, Report
from drivetrain_lint.finding import Finding
from drivetrain_lint.rules.rule import Rule

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def as_sarif(report: Report) -> str:
    """Return the findings, and the rules that were checked, as a SARIF log of one run."""
    from importlib.metadata import version  # slow to import, and the other reports do not need it

    rules = [UNREADABLE, *report.rules]
    indices = {rule.code: index for index, rule in enumerate(rules)}
    driver = {
        "name": "drivetrain lint",
        "semanticVersion": version("drivetrain-lint"),
        "rules": [_rule(rule) for rule in rules],
    }
    run = {
        "tool": {"driver": driver},
        "columnKind": "unicodeCodePoints",
        "results": [_result(finding, indices[finding.code]) for finding in report.findings],
    }
    return f"{json.dumps({'$schema': SCHEMA, 'version': '2.1.0', 'runs': [run]}, indent=2)}\n"


def _rule(rule: Rule[Any]) -> dict[str, Any]:
    return {
        "id": rule.code,
        "name": "".join(word.capitalize() for word in rule.name.split("-")),
        "shortDescription": {"text": rule.summary},
        "fullDescription": {"text": f"{rule.summary} {rule.why}"},
        "help": {"text": rule.mend},
        "defaultConfiguration": {"level": rule.severity, "enabled": True},
    }


def _result(finding: Finding, rule_index: int) -> dict[str, Any]:
    cell = "" if finding.cell is None else f" (cell {finding.cell}, line {finding.line})"
    path = Path(finding.path)
    uri = path.as_uri() if path.is_absolute() else quote(path.as_posix())
    location: dict[str, Any] = {"artifactLocation": {"uri": uri}}
    if finding.cell is None:  # a line of a notebook's cell is none of the file
        location["region"] = {
            "startLine": finding.line,
            "startColumn": finding.column,
            "endColumn": max(finding.end_column, finding.column),
            "snippet": {"text": finding.source_line},
        }
    return {
        "ruleId": finding.code,
        "ruleIndex": rule_index,
        "level": finding.severity,
        "message": {"text": f"{finding.what}{cell}. {finding.why} {finding.mend}"},
        "locations": [{"physicalLocation": location}],
    }
