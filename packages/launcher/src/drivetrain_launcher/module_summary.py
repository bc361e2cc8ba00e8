"""Read what a module's source says of it, without running the module: its imports may take seconds."""

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ast import Module


def module_summary(module: str) -> str:
    """Return the first line of a module's docstring; empty if the module's source is not available."""
    line = _source_of(module).partition("\n")[0]
    if len(line) > 3 and line.startswith('"""') and "\\" not in line:  # reading the whole module takes longer
        return line[3:].partition('"""')[0].strip()
    from ast import get_docstring

    return (get_docstring(parse_module(module)) or "").partition("\n")[0]


def module_topic(module: str) -> str:
    """Return the topic of a module's command, a line `TOPIC = "..."` of its source; empty without one."""
    found = re.search(r'^TOPIC = "(.+)"', _source_of(module), re.MULTILINE)
    return "" if found is None else found[1]


def parse_module(module: str) -> "Module":
    """Return the syntax tree of a module; an empty tree if the module's source is not available."""
    from ast import parse

    return parse(_source_of(module))


def _source_of(module: str) -> str:
    from importlib.util import find_spec

    spec = find_spec(module)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return ""
    with open(spec.origin, encoding="utf-8") as source:
        return source.read()
