"""One word, one meaning: names of public classes and of files stand once in the workspace, but for those listed."""

import ast
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

from checks.findings import Finding
from checks.sources import Source, read_sources

# The same thing in several packages, or one of its kinds in each.
CLASSES_MEANT = frozenset(
    {"Command"}
)  # a subcommand as the launcher takes it; dispatch cannot import the launcher
FILES_MEANT = (
    frozenset(
        {
            "errors",
            "settings",
            "arguments",
            "protocol",
            "registry",
            "testing",
            "_nested",
        }  # one a package
    )
    | frozenset(
        # One of each backend, and of each command beside what it does.
        {
            "applied",
            "compat",
            "backend",
            "gradients",
            "optimizer",
            "prepared",
            "state",
            "merge",
            "verify",
            "plan",
        }
    )
    | frozenset(
        # The same concept in packages that do not know each other.
        {
            "collective_errors",
            "meta_init",
        }
    )
    | frozenset({"scatter", "shard"})
)


def check(root: Path) -> list[Finding]:
    """Look at the names of every package's files and public classes."""
    sources = list(read_sources(root, "packages/*/src/**/*.py"))
    return [*classes_twice(sources), *files_twice(sources)]


def classes_twice(sources: Iterable[Source]) -> list[Finding]:
    """Return the public classes whose name another class of the workspace has."""
    places: dict[str, list[str]] = {}
    for source in sources:
        for node in source.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(f"{source.path}:{node.lineno}")
    return _twice("class", places, CLASSES_MEANT)


def files_twice(sources: Iterable[Source]) -> list[Finding]:
    """Return the files whose name another file of the workspace has."""
    places: dict[str, list[str]] = {}
    for source in sources:
        name = PurePosixPath(source.path).stem
        if name not in ("__init__", "__main__"):
            places.setdefault(name, []).append(source.path)
    return _twice("file", places, FILES_MEANT)


def _twice(kind: str, places: Mapping[str, list[str]], meant: Iterable[str]) -> list[Finding]:
    known = frozenset(meant)
    return [
        Finding(
            where=where[-1],
            message=f"a {kind} {name!r} stands in {where[0]} too: name one by its difference, or list it as meant",
        )
        for name, where in places.items()
        if len(where) > 1 and name not in known
    ]
