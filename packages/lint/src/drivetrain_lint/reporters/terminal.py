"""Findings as text: the place, the source line with a mark under the fault, why and mend."""

import textwrap
from collections.abc import Callable

from drivetrain_lint.checker import Report, counted
from drivetrain_lint.finding import Finding, Severity
from drivetrain_messages import format_count

_COLOURS = {Severity.ERROR: "31", Severity.WARNING: "33", Severity.INFO: "36"}
_BOLD, _DIM, _GREEN = "1", "2", "32"
_WIDTH = 100


# Colours a text by an ANSI code, or leaves it.
_Painter = Callable[[str, str], str]


def as_text(report: Report, *, is_coloured: bool = False, width: int = _WIDTH) -> str:
    """Return the findings as text, with a count at the end.

    Args:
        report: The findings to show.
        is_coloured: Whether to colour it for a terminal.
        width: The number of columns.
    """

    def paint(text: str, code: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if is_coloured else text

    shown = [_finding(finding, paint, width) for finding in report.findings]
    return "\n".join([*shown, summary(report) if report.findings else paint(summary(report), _GREEN), ""])


def _finding(finding: Finding, paint: _Painter, width: int) -> str:
    severity = paint(finding.severity.value, f"{_BOLD};{_COLOURS[finding.severity]}")
    head = f"{paint(finding.place, _BOLD)} {severity} {finding.code} {paint(finding.name, _DIM)}"
    body = _wrapped(finding.what, "  ", "  ", width)
    source = _marked(finding, paint)
    why = _wrapped(finding.why, "  why   ", "        ", width)
    mend = _wrapped(finding.mend, "  mend  ", "        ", width)
    why = why.replace("  why", f"  {paint('why', _DIM)}", 1)
    mend = mend.replace("  mend", f"  {paint('mend', _GREEN)}", 1)
    return "\n".join([head, body, *source, why, mend, ""])


def _marked(finding: Finding, paint: _Painter) -> list[str]:
    """Return the source line, and below it a mark under the fault; tabs keep their width in both."""
    if not finding.source_line.strip():
        return []
    text = finding.source_line.rstrip().expandtabs(4)
    start = len(finding.source_line[: finding.column - 1].expandtabs(4))
    end = len(finding.source_line[: finding.end_column - 1].expandtabs(4))
    number = str(finding.line)
    margin = " " * len(number)
    mark = "^" * max(end - start, 1)
    return [
        f"  {paint(f'{margin} |', _DIM)}",
        f"  {paint(f'{number} |', _DIM)} {text}",
        f"  {paint(f'{margin} |', _DIM)} {' ' * start}{paint(mark, _COLOURS[finding.severity])}",
    ]


def summary(report: Report) -> str:
    """Return the number of files and of findings, in a line."""
    files = format_count(report.num_files, "file")
    if not report.findings:
        return f"{files}, nothing found"
    counts = [format_count(number, str(severity)) for severity, number in counted(report.findings)]
    return f"{files}, {', '.join(counts)}"


def _wrapped(text: str, first: str, others: str, width: int) -> str:
    return textwrap.fill(
        text,
        width,
        initial_indent=first,
        subsequent_indent=others,
        break_long_words=False,
        break_on_hyphens=False,
    )
