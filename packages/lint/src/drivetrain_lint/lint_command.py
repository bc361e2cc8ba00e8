"""Find what hangs or trains wrong on several ranks."""

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from drivetrain_config import environ
from drivetrain_lint.checker import Report, check_targets
from drivetrain_lint.errors import LintArgumentError
from drivetrain_lint.reading.targets import find_targets
from drivetrain_lint.reporters import as_github, as_json, as_sarif, as_text, summary
from drivetrain_lint.rules.registry import choose_rules
from drivetrain_messages import argument

TOPIC = "Check"  # in `drivetrain --help`

_FOUND = 1
_WIDEST = 110


@dataclass(frozen=True, slots=True, kw_only=True)
class LintArguments:
    """The arguments of `drivetrain lint`."""

    script: tuple[str, ...] = argument(
        ..., "Scripts, notebooks, folders, or modules by their dotted names.", positional=True
    )
    format: Literal["text", "json", "sarif", "github"] = argument(
        "text", "Output: text for people, json, sarif, or GitHub's annotations."
    )
    select: tuple[str, ...] = argument(
        (), "Check these rules alone, by codes or their beginnings: DT1,DT303; or all."
    )
    ignore: tuple[str, ...] = argument((), "Leave out these rules, by codes or their beginnings.")
    output: Path | None = argument(None, "Write to this file, and only a count to stderr.")


def run(arguments: LintArguments) -> int:
    """Find what hangs or trains wrong on several ranks in training scripts, without running them."""
    rules = choose_rules(select=arguments.select, ignore=arguments.ignore)
    targets = find_targets(arguments.script, base=Path())
    report = check_targets(targets, rules=rules)
    output = arguments.output
    if output is None:
        sys.stdout.write(_render(report, arguments.format, is_terminal=sys.stdout.isatty()))
    else:
        try:
            output.write_text(_render(report, arguments.format, is_terminal=False), encoding="utf-8")
        except OSError as error:
            raise LintArgumentError(f"--output {output}: cannot be written: {error.strerror}") from error
        sys.stderr.write(f"drivetrain: {summary(report)}, written to {output}\n")
    return _FOUND if report.findings else 0


def _render(report: Report, format: str, *, is_terminal: bool) -> str:
    render = {"json": as_json, "sarif": as_sarif, "github": as_github}.get(format)
    if render is not None:
        return render(report)
    colours = environ.read("NO_COLOR") in (None, "") and (is_terminal or bool(environ.read("FORCE_COLOR")))
    width = min(shutil.get_terminal_size().columns, _WIDEST) if is_terminal else _WIDEST
    return as_text(report, is_coloured=colours, width=width)
