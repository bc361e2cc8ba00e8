"""YAML for files of settings: no key twice, the line of each key, and no value that two versions of YAML read apart.

PyYAML reads version 1.1, in which `010` is eight and `1:30` is ninety. Newer readers, and most people, read neither
so.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from drivetrain_config.errors import ConfigError

Lines = Mapping[tuple[str, ...], int]  # (section,) or (section, field) to its line, counted from 1

_TAG = "tag:yaml.org,2002:"
_NEW_OCTAL = re.compile(r"[-+]?0o[0-7_]+")
_SPECIAL_FLOAT = re.compile(r"[-+]?\.(inf|nan)", re.IGNORECASE)


def read_yaml(path: Path, text: str) -> tuple[Any, Lines]:
    """Read a document, and where its keys stand.

    Raises:
        ConfigError: It does not parse, says a key twice, or has a number that is read in two ways.
        RecursionError: It is nested too deeply.
    """
    try:
        import yaml
    except ImportError as error:
        raise ConfigError(
            f"{path}: YAML needs PyYAML: pip install 'drivetrain-config[yaml]', or write TOML or JSON"
        ) from error
    try:
        loader = yaml.SafeLoader(text)
        root: Any = loader.get_single_node()
        if root is None:
            return None, {}
        for node in _scalars(root):
            _check_scalar(path, node, loader)
        lines = _lines_of(path, root)  # before constructing, which resolves merges in place
        return loader.construct_document(root), lines
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f":{error.problem_mark.line + 1}"
        raise ConfigError(
            f"{path}{line}: cannot be read as YAML: {error.problem or error.context}"
        ) from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: cannot be read as YAML: {error}") from error


def _scalars(root: Any) -> Iterator[Any]:
    """Walk the scalars of a document, keys among them, each once."""
    seen: set[int] = set()  # an alias repeats a node, and may repeat the one it stands in
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if node.id == "scalar":
            yield node
        elif node.id == "sequence":
            waiting += node.value
        else:
            waiting += [each for pair in node.value for each in pair]


def _check_scalar(path: Path, node: Any, loader: Any) -> None:
    """Refuse a number that Python, and YAML of another version, would read as another; a date is text.

    Raises:
        ConfigError: It is such a number; the message names it and its line.
    """
    kind = node.tag.removeprefix(_TAG)
    if kind == "timestamp":
        node.tag = f"{_TAG}str"  # no setting is a date, and newer YAML has none
    elif kind == "int" and not _is_python(int, node.value):
        _refuse(path, node, str(loader.construct_yaml_int(node)))
    elif kind == "float" and not (_is_python(float, node.value) or _SPECIAL_FLOAT.fullmatch(node.value)):
        _refuse(path, node, str(loader.construct_yaml_float(node)))
    elif kind == "str" and node.style is None and _NEW_OCTAL.fullmatch(node.value):
        _refuse(path, node, "text")


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


def _lines_of(path: Path, root: Any) -> Lines:
    """Find where the keys of a document stand; of two equal keys PyYAML itself would let the last one win."""
    lines: dict[tuple[str, ...], int] = {}
    seen: set[int] = set()
    waiting: list[tuple[tuple[str, ...], Any]] = [((), root)]
    while waiting:
        keys, node = waiting.pop()
        if id(node) in seen or node.id == "scalar":
            continue
        seen.add(id(node))
        if node.id == "sequence":
            waiting += [((*keys, str(index)), item) for index, item in enumerate(node.value)]
            continue
        for key, value in node.value:
            at, line = (*keys, str(key.value)), key.start_mark.line + 1
            if at in lines and key.value != "<<":
                raise ConfigError(
                    f"{path}:{line}: says {key.value!r} again, after line {lines[at]}; keep one"
                )
            lines[at] = line
            waiting.append((at, value))
    return lines
