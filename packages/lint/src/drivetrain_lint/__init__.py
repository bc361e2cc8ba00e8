"""A linter of training scripts that finds code that hangs or silently trains wrong on several ranks.

Scripts are parsed, never imported or run. `find_targets` finds files, notebooks and modules by their names;
`check_targets` reads the files and returns a `Report`. `reading` parses; `flow` finds the statements that only some
ranks reach; each file of `rules` is one concern; `reporters` writes the outputs.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from drivetrain_lint.checker import Report as Report
    from drivetrain_lint.checker import check_targets as check_targets
    from drivetrain_lint.errors import LintArgumentError as LintArgumentError
    from drivetrain_lint.finding import Finding as Finding
    from drivetrain_lint.finding import Severity as Severity
    from drivetrain_lint.reading.targets import Target as Target
    from drivetrain_lint.reading.targets import find_targets as find_targets
    from drivetrain_lint.rules.registry import choose_rules as choose_rules

# Module -> its public names.
_NAMES = {
    "checker": "check_targets Report",
    "errors": "LintArgumentError",
    "finding": "Finding Severity",
    "reading.targets": "find_targets Target",
    "rules.registry": "choose_rules",
}

if not TYPE_CHECKING:  # else a type checker would accept any name
    from drivetrain_messages.lazy_names import lazy_names as _lazy_names

    __all__, __getattr__, __dir__ = _lazy_names(__name__, _NAMES)
