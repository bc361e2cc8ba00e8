"""Files stay small, and their names say what they hold."""

import ast
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from checks.backend_branches import backend_branches
from checks.budget import DESIGN, overdrawn
from checks.circles import circles
from checks.findings import Finding
from checks.forbidden import RULES
from checks.private_names import TABLE, private_names
from checks.settings_modules import foreign_imports, unimportable_settings
from checks.sources import Source, read_sources
from checks.workspace import read_packages
from checks.world_groups import world_groups

MOST_LINES_A_FILE = 400
MOST_LINES_A_HEART = 600  # the one file of a package that holds what the package is for
MOST_LINES_A_FUNCTION = 60  # beside its docstring, which is as long as its arguments are many
NAMES_THAT_SAY_NOTHING = frozenset({"utils", "util", "common", "helpers", "helper", "core", "misc"})


def check(root: Path) -> list[Finding]:
    """Look at every file of every package, and at the tools, benchmarks and examples beside them."""
    files = list(read_sources(root, "packages/*/src/**/*.py"))
    beside = list(read_sources(root, "tools/**/*.py", "benchmarks/**/*.py", "examples/**/*.py"))
    known = read_packages(root)
    found = [finding for source in [*files, *beside] for finding in lengths_and_names(source)]
    found += [*long_files(files, hearts=1), *long_files(beside, hearts=0)]
    found += [*overdrawn(files, (root / DESIGN).read_text()), *circles(files)]
    found += [finding for source in files for rule in RULES for finding in rule(source)]
    found += backend_branches(files, known.values())
    found += world_groups(files)
    found += private_names(files, (root / TABLE).read_text())
    found += [finding for source in files for finding in foreign_imports(source)]
    found += unimportable_settings(root, known.values())
    return found


def lengths_and_names(source: Source) -> list[Finding]:
    """Functions and module names against the limits."""
    return [*_long_functions(source), *_empty_name(source)]


def long_files(sources: Iterable[Source], *, hearts: int) -> list[Finding]:
    """Files that are longer than they may be.

    Args:
        sources: The files to look at.
        hearts: How many files of each folder below the first may be hearts, which may be longer.
    """
    lines = {source.path: len(source.text.splitlines()) for source in sources}
    spare: defaultdict[str, int] = defaultdict(lambda: hearts)
    found: list[Finding] = []
    for path, number in sorted(lines.items(), key=lambda item: -item[1]):
        package = "/".join(PurePosixPath(path).parts[:2])
        if MOST_LINES_A_FILE < number <= MOST_LINES_A_HEART and spare[package]:
            spare[package] -= 1
        elif number > MOST_LINES_A_FILE:
            most = f"{MOST_LINES_A_FILE}, the heart of a package {MOST_LINES_A_HEART}"
            message = f"{number} lines; a file has at most {most}: give its second concept a file of its own"
            found.append(Finding(where=path, message=message))
    return found


def _long_functions(source: Source) -> list[Finding]:
    found: list[Finding] = []
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if ast.get_docstring(node) is not None:
                first = node.body[0]
                lines -= (first.end_lineno or first.lineno) - first.lineno + 1
            if lines > MOST_LINES_A_FUNCTION:
                message = (
                    f"{node.name}() has {lines} lines beside its docstring; a function has at most "
                    f"{MOST_LINES_A_FUNCTION}"
                )
                found.append(source.finding(node, message))
    return found


def _empty_name(source: Source) -> list[Finding]:
    path = PurePosixPath(source.path)
    words = [part.strip("_") for part in (*path.parts[:-1], path.stem)]
    said = [word for word in words if word in NAMES_THAT_SAY_NOTHING]
    return [
        Finding(where=source.path, message=f"{word!r} does not say what the file holds: name its concept")
        for word in said
    ]
