"""The linter's run: read each file, check every rule, sort what was found."""

import ast
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from drivetrain_lint.finding import Finding, Hit, Severity
from drivetrain_lint.flow.program import read_program
from drivetrain_lint.reading.documents import Document, Unreadable, read_document
from drivetrain_lint.reading.targets import Target
from drivetrain_lint.rules.rule import Rule
from drivetrain_lint.suppressions import read_suppressions

UNREADABLE = "DT001"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The result of a run of the linter.

    Attributes:
        findings: The faults, by file and line.
        num_files: The number of files that were looked at.
        rules: The rules that were checked.
    """

    findings: tuple[Finding, ...]
    num_files: int
    rules: tuple[Rule, ...]

    @property
    def is_clean(self) -> bool:
        """True if nothing was found but habits."""
        return all(finding.severity is Severity.INFO for finding in self.findings)


def check_targets(targets: Iterable[Target], *, rules: Sequence[Rule]) -> Report:
    """Check files; one that cannot be parsed is a finding, and the others are checked all the same."""
    findings: list[Finding] = []
    num_files = 0
    for target in targets:
        num_files += 1
        document = read_document(target.path, shown=target.shown)
        findings += check_document(document, rules=rules)
    return Report(findings=tuple(findings), num_files=num_files, rules=tuple(rules))


def check_document(document: Document | Unreadable, *, rules: Sequence[Rule]) -> list[Finding]:
    """Return the findings of one file, in the order of its lines."""
    if isinstance(document, Unreadable):
        return [_unreadable(document)]
    try:
        program = read_program(document)
        hits = [(rule, hit) for rule in rules for hit in rule.check(program)]
    except RecursionError:  # parsed, and nested deeper than the walk may follow
        reason = "is nested too deeply to be checked"
        return [_unreadable(Unreadable(path=document.path, line=1, column=1, reason=reason))]
    suppressed = read_suppressions(document)
    found = {
        _finding(document, rule, hit): None
        for rule, hit in hits
        if not suppressed.cover(hit.node, code=rule.code, name=rule.name)
    }
    return sorted(found, key=lambda each: (each.cell or 0, each.line, each.column, each.code))


def _finding(document: Document, rule: Rule, hit: Hit) -> Finding:
    line, start = getattr(hit.node, "lineno", 1), getattr(hit.node, "col_offset", 0)
    text = document.lines[line - 1] if line <= len(document.lines) else ""
    ends_here = getattr(hit.node, "end_lineno", line) == line and not isinstance(hit.node, ast.ExceptHandler)
    end = getattr(hit.node, "end_col_offset", None) if ends_here else None
    column = _characters(text, start)
    cell, shown_line = document.place(line)
    return Finding(
        path=document.path,
        line=shown_line,
        column=column + 1,
        end_column=(len(text.rstrip()) if end is None else _characters(text, end)) + 1,
        code=rule.code,
        name=rule.name,
        severity=hit.severity or rule.severity,
        what=hit.what if hit.what[:1] == "`" else hit.what[:1].upper() + hit.what[1:],
        why=rule.why,
        mend=hit.mend or rule.mend,
        source_line=text,
        cell=cell,
    )


def _characters(text: str, offset: int) -> int:
    """Return the number of characters in a number of UTF-8 bytes, in which syntax trees count."""
    return len(text.encode()[:offset].decode(errors="ignore"))


def _unreadable(file: Unreadable) -> Finding:
    return Finding(
        path=file.path,
        line=file.line,
        column=file.column,
        end_column=file.column + 1,
        code=UNREADABLE,
        name="unreadable",
        severity=Severity.ERROR,
        what=f"The file {file.reason}",
        why="Nothing in it was checked.",
        mend="Correct it, or leave the file out.",
        source_line=file.source_line,
        cell=file.cell,
    )


def counted(findings: Sequence[Finding]) -> Iterator[tuple[Severity, int]]:
    """Iterate over the severities that occur, the heaviest first, with the number of their findings."""
    for severity in Severity:
        number = sum(finding.severity is severity for finding in findings)
        if number:
            yield severity, number
