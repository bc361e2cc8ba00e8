"""Read how the folders of a package import each other, and put them on levels. Pure but for reading the sources."""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A folder or a file directly below a package.

    Attributes:
        name: Its name, without ".py".
        files: The names of the files in a folder, without ".py"; () for a file.
        imports: The other parts of the package that it imports.
    """

    name: str
    files: tuple[str, ...]
    imports: frozenset[str]


def parts_of(package: Path) -> dict[str, Part]:
    """Return the parts of a package by name.

    Args:
        package: The folder with its `__init__.py`, named as it is imported.
    """
    sources: dict[str, list[Path]] = {}
    for file in sorted(package.rglob("*.py")):
        first = file.relative_to(package).parts[0].removesuffix(".py")
        if first not in ("__init__", "__main__"):
            sources.setdefault(first, []).append(file)
    return {
        name: Part(
            name=name,
            files=()
            if (package / f"{name}.py").is_file()
            else tuple(file.stem for file in files if file.stem != "__init__"),
            imports=frozenset(
                other
                for file in files
                for other in _imported(file, package.name)
                if other in sources and other != name
            ),
        )
        for name, files in sources.items()
    }


def levels_of(parts: Mapping[str, Part]) -> list[list[str]]:
    """Return the names of parts level by level, those that import others first; each stands as low as it can.

    Raises:
        ValueError: Some import each other in a circle.
    """
    heights: dict[str, int] = {}
    while len(heights) < len(parts):
        known = {
            name: max((heights[other] for other in part.imports), default=-1) + 1
            for name, part in parts.items()
            if name not in heights and part.imports <= heights.keys()
        }
        if not known:
            circle = ", ".join(sorted(parts.keys() - heights.keys()))
            raise ValueError(f"these import each other in a circle: {circle}")
        heights |= known
    most = max(heights.values(), default=-1)
    return [
        sorted(name for name, height in heights.items() if height == level) for level in range(most, -1, -1)
    ]


def _imported(file: Path, package: str) -> set[str]:
    """Return the parts of a package that a file imports from."""
    found: set[str] = set()
    for node in _statements(ast.parse(file.read_text(encoding="utf-8"))):
        modules: list[str] = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        found |= {module.split(".")[1] for module in modules if module.startswith(f"{package}.")}
    return found


def _statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Give the statements below a node: an import is one, and most of a tree are expressions."""
    for block in ("body", "handlers", "cases", "orelse", "finalbody"):
        for node in getattr(tree, block, ()):
            yield node
            yield from _statements(node)
