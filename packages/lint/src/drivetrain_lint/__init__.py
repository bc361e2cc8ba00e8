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
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}

if not TYPE_CHECKING:  # else a type checker would accept any name
    __all__ = sorted(_MODULES)

    def __getattr__(name: str) -> object:
        if name in _MODULES:
            from importlib import import_module

            return getattr(import_module(f"drivetrain_lint.{_MODULES[name]}"), name)
        raise AttributeError(f"module 'drivetrain_lint' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return __all__
