"""The linter's run: read each file, check every rule, sort the findings."""

import ast
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from drivetrain_lint.finding import Finding, Hit, Severity
from drivetrain_lint.flow.program import read_program
from drivetrain_lint.reading.documents import Document, Unreadable, read_document
from drivetrain_lint.reading.targets import Target
from drivetrain_lint.rules.rule import Rule
from drivetrain_lint.rules.visitor import visit
from drivetrain_lint.suppressions import read_suppressions

# Found before there is anything to visit.
UNREADABLE: Rule[Any] = Rule(
    code="DT001",
    name="unreadable",
    severity=Severity.ERROR,
    summary="The file does not parse.",
    why="Nothing in it was checked.",
    repair="Correct it, or leave the file out.",
    visits=lambda _: (),
    check=lambda _: (),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The result of a run of the linter: the findings by file and line, and the rules that were checked."""

    findings: tuple[Finding, ...]
    num_files: int
    rules: tuple[Rule[Any], ...]

    @property
    def counts(self) -> dict[Severity, int]:
        """The number of findings by severity, errors first; severities without findings are absent."""
        found = [finding.severity for finding in self.findings]
        return {severity: found.count(severity) for severity in Severity if severity in found}


def check_targets(targets: Iterable[Target], *, rules: Sequence[Rule[Any]]) -> Report:
    """Check files; a file that does not parse is a finding."""
    files = list(targets)
    findings = [
        finding
        for file in files
        for finding in check_document(read_document(file.path, shown=file.shown), rules=rules)
    ]
    return Report(findings=tuple(findings), num_files=len(files), rules=tuple(rules))


def check_document(document: Document | Unreadable, *, rules: Sequence[Rule[Any]]) -> list[Finding]:
    """Return the findings of one file, in the order of its lines."""
    if isinstance(document, Document):
        try:
            visitor = visit(read_program(document))
            hits = [(rule, hit) for rule in rules for hit in rule.find(visitor)]
        except RecursionError:  # parsed, and nested deeper than the walk may follow
            document = Unreadable(path=document.path, what="The file is nested too deeply to be checked")
        else:
            suppressed = read_suppressions(document)
            found = {
                _make_finding(document, rule, hit)
                for rule, hit in hits
                if not suppressed.cover(hit.node, code=rule.code, name=rule.name)
            }
            return sorted(
                found, key=lambda each: (each.cell or 0, each.line, each.column, each.code, each.what)
            )
    unreadable = Finding(
        **asdict(document),
        end_column=document.column + 1,
        code=UNREADABLE.code,
        name=UNREADABLE.name,
        severity=UNREADABLE.severity,
        why=UNREADABLE.why,
        repair=UNREADABLE.repair,
    )
    return [unreadable]


def _make_finding(document: Document, rule: Rule[Any], hit: Hit) -> Finding:
    line, start = getattr(hit.node, "lineno", 1), getattr(hit.node, "col_offset", 0)
    text = document.lines[line - 1] if line <= len(document.lines) else ""
    ends_here = getattr(hit.node, "end_lineno", line) == line and not isinstance(hit.node, ast.ExceptHandler)
    end = getattr(hit.node, "end_col_offset", None) if ends_here else None
    column = _count_characters(text, start)
    cell, shown_line = document.place(line)
    return Finding(
        path=document.path,
        line=shown_line,
        column=column + 1,
        end_column=(len(text.rstrip()) if end is None else _count_characters(text, end)) + 1,
        code=rule.code,
        name=rule.name,
        severity=hit.severity or rule.severity,
        what=hit.what if hit.what[:1] == "`" else hit.what[:1].upper() + hit.what[1:],
        why=rule.why,
        repair=hit.repair or rule.repair,
        source_line=text,
        cell=cell,
    )


def _count_characters(text: str, offset: int) -> int:
    """Return the number of characters in the first `offset` UTF-8 bytes; syntax trees count in bytes."""
    return len(text.encode()[:offset].decode(errors="ignore"))
