"""Python files, read and parsed once for the checks that look into them."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from checks.findings import Finding


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One Python file.

    Attributes:
        path: Where it stands, from the repository's root, with forward slashes.
        text: What it holds.
        tree: Its syntax tree.
    """

    path: str
    text: str
    tree: ast.Module

    def finding(self, node: ast.AST, message: str) -> Finding:
        """A finding at the line where `node` begins."""
        return Finding(where=f"{self.path}:{getattr(node, 'lineno', 1)}", message=message)


def parse(path: str, text: str) -> Source:
    """Parse a file's text.

    Raises:
        SyntaxError: The text is not Python.
    """
    return Source(path=path, text=text, tree=ast.parse(text, path))


def read_sources(root: Path, *patterns: str) -> Iterator[Source]:
    """The Python files that match the glob patterns below `root`, in order of their paths."""
    for file in sorted({file for pattern in patterns for file in root.glob(pattern)}):
        yield parse(file.relative_to(root).as_posix(), file.read_text())
