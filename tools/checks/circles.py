"""No circles: within a folder, modules and folders import each other in one direction, also for types alone."""

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter

from checks.findings import Finding
from checks.sources import Source


def circles(files: Iterable[Source]) -> list[Finding]:
    """Find a circle in each folder of every package that has one.

    import-linter looks at the floors and at the folders that its contracts name; this looks at all of them.
    """
    sources = {_module(source.path): source for source in files}
    edges: defaultdict[str, defaultdict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for module, source in sources.items():
        for imported in _imported(source, sources):
            folder, one, other = _part(module, imported)
            if folder and one != other:
                edges[folder][one].add(other)
    return [found for folder in sorted(edges) for found in _circle(folder, edges[folder])]


def _circle(folder: str, imports: Mapping[str, set[str]]) -> list[Finding]:
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        names: list[str] = error.args[1]
        return [Finding(where=folder, message=f"{' <- '.join(names)}: a circle of imports; turn one of them")]
    return []


def _module(path: str) -> str:
    return path.partition("/src/")[2].removesuffix(".py").replace("/", ".")


def _imported(source: Source, known: Mapping[str, Source]) -> Iterator[str]:
    """The modules of the workspace that a module imports anywhere, whichever way."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in known else node.module for name in names]
        else:
            continue
        yield from (name for name in names if name in known)


def _part(module: str, imported: str) -> tuple[str, str, str]:
    """The folder in which two modules part, and the child of it that holds each."""
    one, other = module.split("."), imported.split(".")
    depth = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), 0)
    return ".".join(one[:depth]), one[depth], other[depth]
