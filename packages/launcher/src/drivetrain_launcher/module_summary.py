"""Read a module's summary from its source, without running the module: its imports may take seconds."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ast import Module


def module_summary(module: str) -> str:
    """Return the first line of a module's docstring; empty if the module's source is not available."""
    from ast import get_docstring  # imported here: most commands need none of it

    return (get_docstring(parse_module(module)) or "").partition("\n")[0]


def parse_module(module: str) -> "Module":
    """Return the syntax tree of a module; an empty tree if the module's source is not available."""
    from ast import parse
    from importlib.util import find_spec

    spec = find_spec(module)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return parse("")
    with open(spec.origin, encoding="utf-8") as source:
        return parse(source.read())
