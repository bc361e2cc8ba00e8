"""Read YAML settings with the line of each key; refuse repeated keys and values that YAML versions read differently.

PyYAML reads version 1.1, in which `010` is eight and `1:30` is ninety. Newer readers and most people read both
differently.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from drivetrain_config.errors import ConfigError
from drivetrain_config.files.file_text import too_deep
from drivetrain_config.values.kinds import MOST_LEVELS

Lines = Mapping[tuple[str, ...], int]  # the line of each (section,) or (section, field), from 1

_TAG = "tag:yaml.org,2002:"
_NEW_OCTAL = re.compile(r"[-+]?0o[0-7_]+")
_SPECIAL_FLOAT = re.compile(r"[-+]?\.(inf|nan)", re.IGNORECASE)


def read_yaml(path: Path, text: str) -> tuple[Any, Lines]:
    """Parse a document, and find the line of each key; ConfigError, with the line, for a mistake."""
    try:
        import yaml
    except ImportError as error:
        raise ConfigError(
            f"{path}: YAML needs PyYAML: pip install 'drivetrain-config[yaml]', or write TOML or JSON"
        ) from error
    try:
        check_levels(path, text)
        loader = yaml.SafeLoader(text)
        root: Any = loader.get_single_node()
        if root is None:
            return None, {}
        lines = _read_lines(path, root, loader)  # before constructing, which resolves merges in place
        return loader.construct_document(root), lines
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f":{error.problem_mark.line + 1}"
        raise ConfigError(
            f"{path}{line}: cannot be read as YAML: {error.problem or error.context}"
        ) from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: cannot be read as YAML: {error}") from error


def check_levels(path: Path, text: str) -> None:
    """Refuse a document that is nested too deeply, without reading the rest."""
    import yaml

    level = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        level += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if level > MOST_LEVELS:
            raise too_deep(path)


def _is_python(kind: type[int] | type[float], text: str) -> bool:
    try:
        kind(text, 0) if kind is int else kind(text)
    except ValueError:
        return False
    return True


def _refuse(path: Path, node: Any, meaning: str) -> None:
    raise ConfigError(
        f"{path}:{node.start_mark.line + 1}: {node.value} is {meaning} in YAML 1.1 and something else to newer "
        "readers: write the plain decimal number, or put it in quotes if it is text"
    )


def _read_lines(path: Path, root: Any, loader: Any) -> Lines:
    """Return the line of each key, and turn dates into text.

    ConfigError for a repeated key, since PyYAML silently keeps the last value, and for numbers, also as keys, that
    other versions of YAML read differently.
    """
    lines: dict[tuple[str, ...], int] = {}
    seen: set[int] = set()  # an alias repeats a node, and may even refer to its own parent
    waiting: list[tuple[tuple[str, ...], Any]] = [((), root)]
    while waiting:
        keys, node = waiting.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        kind = node.tag.removeprefix(_TAG)
        if node.id == "sequence":
            waiting += [((*keys, str(index)), item) for index, item in enumerate(node.value)]
        elif node.id == "mapping":
            for key, value in node.value:
                at, line = (*keys, str(key.value)), key.start_mark.line + 1
                if at in lines and key.value != "<<":
                    raise ConfigError(
                        f"{path}:{line}: says {key.value!r} again, after line {lines[at]}; keep one"
                    )
                lines[at] = line
                waiting += [(at, value), (at, key)]
        elif kind == "timestamp":
            node.tag = f"{_TAG}str"  # no setting is a date, and newer YAML has no dates
        elif kind == "int" and not _is_python(int, node.value):
            _refuse(path, node, str(loader.construct_yaml_int(node)))
        elif kind == "float" and not (_is_python(float, node.value) or _SPECIAL_FLOAT.fullmatch(node.value)):
            _refuse(path, node, str(loader.construct_yaml_float(node)))
        elif kind == "str" and node.style is None and _NEW_OCTAL.fullmatch(node.value):
            _refuse(path, node, "text")
    return lines
