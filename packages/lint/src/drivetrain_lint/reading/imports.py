"""Dotted names: as they are written, and with imports resolved."""

import ast
from collections.abc import Mapping


def read_imports(tree: ast.Module) -> dict[str, str]:
    """Return the dotted name that each imported name stands for, imports in functions included."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.asname:
                    found[alias.asname] = alias.name
                else:  # `import torch.distributed` binds `torch`; the longest module counts as imported
                    found.setdefault(alias.name.partition(".")[0], alias.name.partition(".")[0])
                    found.setdefault(alias.name, alias.name)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            for alias in node.names:
                found[alias.asname or alias.name] = f"{module}.{alias.name}"
    return found


def written(node: ast.AST) -> str:
    """Return the dotted name of an expression as written; empty for other expressions."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        inner = written(node.value)
        return f"{inner}.{node.attr}" if inner else ""
    return ""


def last_name(node: ast.AST) -> str:
    """Return the last part of a dotted name; empty for other expressions."""
    return written(node).rpartition(".")[2]


def resolved(node: ast.AST, imports: Mapping[str, str]) -> str:
    """Return the dotted name of an expression with imports resolved; empty for other expressions."""
    name = written(node)
    head, dot, rest = name.partition(".")
    return f"{imports.get(head, head)}{dot}{rest}"


def word_set(words: str) -> frozenset[str]:
    """Return the set of names in a text, for long lists of names."""
    return frozenset(words.split())
