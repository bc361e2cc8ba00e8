"""The table of all findings: a row for each check, and below it each finding with its repair."""

import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from drivetrain_doctor.doctor_finding import CheckReport, DoctorFinding, Examination, State
from drivetrain_messages import format_count, list_some

# How far apart two columns stand, and where findings begin.
_GAP, _INDENT = "  ", "         "
_COLOURS: Mapping[str, str] = {
    "ok": "\x1b[32m",
    "warning": "\x1b[33m",
    "error": "\x1b[31m",
    "skipped": "\x1b[2m",
    "bold": "\x1b[1m",
    "repair": "\x1b[36m",
}
_END = "\x1b[0m"
_WORST: tuple[State, ...] = ("error", "warning", "ok", "skipped")
_SHOWN = 8
_NUMBER = re.compile(r"[0-9][0-9.,]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRow:
    """A check on one host or on several; a finding without hosts concerns all of these hosts."""

    name: str
    state: State
    summary: str
    findings: tuple[tuple[DoctorFinding, tuple[str, ...]], ...]


def table(examination: Examination, *, is_coloured: bool, width: int = 100) -> str:
    """Return the table as text, wrapped at `width`, and with `is_coloured` in a terminal's colours."""
    rows = [*merge_hosts(examination.hosts), *merge_hosts([("", examination.together)])]
    widest = max((len(row.name) for row in rows), default=0)
    hosts, count = examination.num_nodes, examination.num_processes
    title = (
        f"drivetrain doctor: {format_count(hosts, 'host')}, {format_count(count, 'process')}, "
        f"{examination.seconds:.1f} s"
    )
    lines = [_paint(title, "bold", is_coloured=is_coloured), ""]
    for row in rows:
        state = _paint(f"{row.state:<7}", row.state, is_coloured=is_coloured)
        first, *more = textwrap.wrap(row.summary, max(20, width - widest - 11)) or [""]
        lines.append(f"{state}{_GAP}{row.name:<{widest}}{_GAP}{first}".rstrip())
        lines += [f"{_INDENT}{' ' * widest}{_GAP}{each}" for each in more]
        for finding, names in row.findings:
            where = f" [{list_some(names, most=_SHOWN)}]" if names else ""
            for colour, start, text in (
                (finding.severity, f"{_INDENT}{finding.severity}: ", finding.what + where),
                ("", f"{_INDENT}  why:    ", finding.why),
                ("repair", f"{_INDENT}  repair: ", finding.repair),
            ):
                indent, label = start[: len(start) - len(start.lstrip())], start.lstrip()
                wrapped = textwrap.wrap(
                    text, max(30, width - len(start)), break_long_words=False, break_on_hyphens=False
                )
                for number, line in enumerate(wrapped):
                    before = label if number == 0 else " " * len(label)
                    lines.append(indent + _paint(f"{before}{line}", colour, is_coloured=is_coloured))
    severities = [finding.severity for row in rows for finding, _ in row.findings]
    errors, warnings = severities.count("error"), severities.count("warning")
    skipped = sum(row.state == "skipped" for row in rows)
    counts = f"{format_count(errors, 'error')}, {format_count(warnings, 'warning')}, {skipped} skipped"
    end, colour = ("a run will break", "error") if errors else ("nothing found that breaks a run", "ok")
    return "\n".join([*lines, "", _paint(f"{counts}: {end}", colour, is_coloured=is_coloured), ""])


def merge_hosts(hosts: Iterable[tuple[str, tuple[CheckReport, ...]]]) -> list[CheckRow]:
    """Return one row for each check; a finding that several hosts have appears once."""
    of_check: dict[str, list[tuple[str, CheckReport]]] = {}
    labels: list[str] = []
    for label, reports in hosts:
        labels.append(label)
        for report in reports:
            of_check.setdefault(report.name, []).append((label, report))
    rows: list[CheckRow] = []
    for name, found in of_check.items():
        having: dict[tuple[str, int], tuple[DoctorFinding, list[str]]] = {}
        for label, report in found:
            numbers: Counter[str] = Counter()
            for finding in report.findings:
                # Hosts that differ in a measured number alone share a finding, shown with the numbers of the first.
                # One host's findings, such as those of two GPUs, stay apart.
                what = f"{finding.severity}: {_NUMBER.sub('#', finding.what)}"
                numbers[what] += 1
                having.setdefault((what, numbers[what]), (finding, []))[1].append(label)
        states = {report.state for _, report in found}
        summary, *others = dict.fromkeys(report.summary for _, report in found)
        if others:
            summary += f" (on {found[0][0]}; {format_count(len(others), 'other')})"
        findings = tuple(
            (finding, () if len(who) == len(labels) else tuple(who)) for finding, who in having.values()
        )
        worst: State = next(state for state in _WORST if state in states)
        rows.append(CheckRow(name=name, state=worst, summary=summary, findings=findings))
    return rows


def _paint(text: str, colour: str, *, is_coloured: bool) -> str:
    return f"{_COLOURS[colour]}{text}{_END}" if is_coloured and colour in _COLOURS else text
