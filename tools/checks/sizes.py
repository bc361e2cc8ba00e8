"""Rooms stay small and say what they hold."""

import ast
from pathlib import Path, PurePosixPath

from checks.backend_branches import backend_branches
from checks.findings import Finding
from checks.forbidden import RULES
from checks.private_names import TABLE, private_names
from checks.settings_rooms import foreign_imports, unimportable_settings
from checks.sources import Source, read_sources
from checks.workspace import read_packages

MOST_LINES_A_FILE = 400
MOST_LINES_A_FUNCTION = 60
NAMES_THAT_SAY_NOTHING = frozenset({"utils", "util", "common", "helpers", "helper", "core", "misc"})


def check(root: Path) -> list[Finding]:
    """Look at every room of every package, and at the tools, benchmarks and examples beside them."""
    rooms = list(read_sources(root, "packages/*/src/**/*.py"))
    beside = list(read_sources(root, "tools/**/*.py", "benchmarks/**/*.py", "examples/**/*.py"))
    known = read_packages(root)
    found = [finding for source in [*rooms, *beside] for finding in lengths_and_names(source)]
    found += [finding for source in rooms for rule in RULES for finding in rule(source)]
    found += backend_branches(rooms, known.values())
    found += private_names(rooms, (root / TABLE).read_text())
    found += [finding for source in rooms for finding in foreign_imports(source)]
    found += unimportable_settings(root, known.values())
    return found


def lengths_and_names(source: Source) -> list[Finding]:
    """Files, functions and module names against the limits."""
    return [*_long_file(source), *_long_functions(source), *_empty_name(source)]


def _long_file(source: Source) -> list[Finding]:
    lines = len(source.text.splitlines())
    if lines <= MOST_LINES_A_FILE:
        return []
    message = (
        f"{lines} lines; a file has at most {MOST_LINES_A_FILE}: give its second concept a room of its own"
    )
    return [Finding(where=source.path, message=message)]


def _long_functions(source: Source) -> list[Finding]:
    found: list[Finding] = []
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MOST_LINES_A_FUNCTION:
                message = f"{node.name}() has {lines} lines; a function has at most {MOST_LINES_A_FUNCTION}"
                found.append(source.finding(node, message))
    return found


def _empty_name(source: Source) -> list[Finding]:
    path = PurePosixPath(source.path)
    words = [part.strip("_") for part in (*path.parts[:-1], path.stem)]
    said = [word for word in words if word in NAMES_THAT_SAY_NOTHING]
    return [
        Finding(where=source.path, message=f"{word!r} does not say what the room holds: name its concept")
        for word in said
    ]
