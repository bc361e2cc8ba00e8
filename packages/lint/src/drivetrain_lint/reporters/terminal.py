"""Findings as text: the place, the source line with a mark under the fault, why and mend."""

import textwrap
from collections.abc import Callable

from drivetrain_lint.checker import Report
from drivetrain_lint.finding import Finding, Severity
from drivetrain_messages import format_count

_COLOURS = {Severity.ERROR: "31", Severity.WARNING: "33"}
_BOLD, _DIM, _GREEN = "1", "2", "32"

# Colours a text by an ANSI code, or leaves it.
_Painter = Callable[[str, str], str]


def as_text(report: Report, *, is_coloured: bool = False, width: int = 100) -> str:
    """Return the findings as text, coloured for a terminal or plain, with a count at the end."""

    def paint(text: str, code: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if is_coloured else text

    shown = [_finding(finding, paint, width) for finding in report.findings]
    return "\n".join([*shown, summary(report) if report.findings else paint(summary(report), _GREEN), ""])


def _finding(finding: Finding, paint: _Painter, width: int) -> str:
    severity = paint(finding.severity.value, f"{_BOLD};{_COLOURS[finding.severity]}")
    lines = [f"{paint(finding.place, _BOLD)} {severity} {finding.code} {paint(finding.name, _DIM)}"]
    lines.append(_wrap(finding.what, "  ", width))
    if finding.source_line.strip():
        lines += _mark(finding, paint)
    for label, text, colour in (("why", finding.why, _DIM), ("mend", finding.mend, _GREEN)):
        lines.append(_wrap(text, f"  {label:<6}", width).replace(label, paint(label, colour), 1))
    return "\n".join([*lines, ""])


def _mark(finding: Finding, paint: _Painter) -> list[str]:
    """Return the source line, and below it a mark under the fault; tabs keep their width in both."""
    text = finding.source_line.rstrip().expandtabs(4)
    start = len(finding.source_line[: finding.column - 1].expandtabs(4))
    end = len(finding.source_line[: finding.end_column - 1].expandtabs(4))
    number = str(finding.line)
    margin = paint(f"{' ' * len(number)} |", _DIM)
    mark = paint("^" * max(end - start, 1), _COLOURS[finding.severity])
    return [f"  {margin}", f"  {paint(f'{number} |', _DIM)} {text}", f"  {margin} {' ' * start}{mark}"]


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
