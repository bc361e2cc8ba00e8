"""The outputs of the linter: text for people, JSON, SARIF, and GitHub's annotations."""

import json
import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import quote

from drivetrain_lint.checker import UNREADABLE, Report
from drivetrain_lint.finding import Severity
from drivetrain_messages import format_count

_COLOURS = {Severity.ERROR: "31", Severity.WARNING: "33"}
_BOLD, _DIM, _GREEN = "1", "2", "32"
_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def as_text(report: Report, *, is_coloured: bool = False, width: int = 100) -> str:
    """Return the findings as text, coloured for a terminal or plain, with a count at the end."""

    def paint(text: str, code: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if is_coloured else text

    lines: list[str] = []
    for finding in report.findings:
        colour = _COLOURS[finding.severity]
        severity = paint(finding.severity.value, f"{_BOLD};{colour}")
        lines.append(f"{paint(finding.place, _BOLD)} {severity} {finding.code} {paint(finding.name, _DIM)}")
        lines.append(_wrap(finding.what, "  ", width))
        if finding.source_line.strip():
            # Tabs keep their width in the source line and before the mark below it.
            start = len(finding.source_line[: finding.column - 1].expandtabs(4))
            end = len(finding.source_line[: finding.end_column - 1].expandtabs(4))
            number, mark = str(finding.line), paint("^" * max(end - start, 1), colour)
            margin = paint(f"{' ' * len(number)} |", _DIM)
            source = f"{paint(f'{number} |', _DIM)} {finding.source_line.rstrip().expandtabs(4)}"
            lines += [f"  {margin}", f"  {source}", f"  {margin} {' ' * start}{mark}"]
        for label, text, label_colour in (("why", finding.why, _DIM), ("repair", finding.repair, _GREEN)):
            lines.append(_wrap(text, f"  {label:<8}", width).replace(label, paint(label, label_colour), 1))
        lines.append("")
    return "\n".join([*lines, summary(report) if report.findings else paint(summary(report), _GREEN), ""])


def summary(report: Report) -> str:
    """Return the number of files and of findings, in a line."""
    counts = [format_count(number, str(severity)) for severity, number in report.counts.items()]
    return f"{format_count(report.num_files, 'file')}, {', '.join(counts) or 'nothing found'}"


def _wrap(text: str, start: str, width: int) -> str:
    return textwrap.fill(
        text,
        width,
        initial_indent=start,
        subsequent_indent=" " * len(start),
        break_long_words=False,
        break_on_hyphens=False,
    )


def as_json(report: Report) -> str:
    """Return the findings, and the number of each severity, as JSON."""
    content = {
        "files": report.num_files,
        "counts": report.counts,
        "findings": [asdict(finding) for finding in report.findings],
    }
    return f"{json.dumps(content, indent=2)}\n"


def as_sarif(report: Report) -> str:
    """Return the findings and the checked rules as a SARIF 2.1.0 log of one run, which hosts and editors read."""
    from importlib.metadata import version  # slow to import, and the other reports do not need it

    rules = [UNREADABLE, *report.rules]
    indices = {rule.code: index for index, rule in enumerate(rules)}
    shown_rules = [
        {
            "id": rule.code,
            "name": "".join(word.capitalize() for word in rule.name.split("-")),
            "shortDescription": {"text": rule.summary},
            "fullDescription": {"text": f"{rule.summary} {rule.why}"},
            "help": {"text": rule.repair},
            "defaultConfiguration": {"level": rule.severity, "enabled": True},
        }
        for rule in rules
    ]
    results: list[dict[str, Any]] = []
    for finding in report.findings:
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
        results.append(
            {
                "ruleId": finding.code,
                "ruleIndex": indices[finding.code],
                "level": finding.severity,
                "message": {"text": f"{finding.what}{cell}. {finding.why} {finding.repair}"},
                "locations": [{"physicalLocation": location}],
            }
        )
    about = {"name": "drivetrain lint", "semanticVersion": version("drivetrain-lint")}
    tool = {"driver": {**about, "rules": shown_rules}}
    run = {"tool": tool, "columnKind": "unicodeCodePoints", "results": results}
    return f"{json.dumps({'$schema': _SCHEMA, 'version': '2.1.0', 'runs': [run]}, indent=2)}\n"


def as_github(report: Report) -> str:
    """Return a workflow command for each finding, which GitHub shows at the lines of a pull request."""
    commands: list[str] = []
    for finding in report.findings:
        properties: dict[str, object] = {"file": finding.path}
        cell = "" if finding.cell is None else f" (cell {finding.cell})"
        if not cell:  # lines of a notebook's file are not those of its cells
            properties |= {"line": finding.line, "col": finding.column, "endColumn": finding.end_column}
        properties["title"] = f"{finding.code} {finding.name}{cell}"
        listed = ",".join(
            f"{name}={_escape(str(value)).replace(':', '%3A').replace(',', '%2C')}"
            for name, value in properties.items()
        )
        message = f"{finding.what}. {finding.why} {finding.repair}".replace("..", ".")
        commands.append(f"::{finding.severity} {listed}::{_escape(message)}\n")
    return "".join(commands)


def _escape(text: str) -> str:
    """Escape a text as the runner unescapes it, so that a file name cannot end a property."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
