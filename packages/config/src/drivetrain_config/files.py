"""Files of settings: YAML, TOML or JSON, read to (section, field, value, line)."""

import json
import tomllib
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from drivetrain_config.accelerate_file import is_accelerate, translate
from drivetrain_config.errors import ConfigError

Row = tuple[str, str, Any, int | None]  # section, field, value, line (None where the parser tells none)


def read_file(path: Path) -> list[Row]:
    """Read a file of settings.

    Args:
        path: Ends in .yaml, .yml, .toml or .json; holds a mapping of sections to mappings of fields.

    Returns:
        Every value with its section, field and line.

    Raises:
        ConfigError: There is no such file, its ending is unknown, or it does not hold sections.
    """
    if not path.is_file():
        beside = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        near = get_close_matches(path.name, beside, n=1)
        raise ConfigError(
            f"{path}: no such file{f'; did you mean {path.with_name(near[0])}' if near else ''}"
        )
    match path.suffix:
        case ".yaml" | ".yml":
            data, lines = _read_yaml(path)
        case ".toml":
            data, lines = _parsed(path, tomllib.loads), {}
        case ".json":
            data, lines = _parsed(path, json.loads), {}
        case suffix:
            raise ConfigError(f"{path}: files of settings end in .yaml, .yml, .toml or .json, not {suffix!r}")
    if not isinstance(data, Mapping):
        raise ConfigError(
            f"{path}: must hold sections, as in `run: {{seed: 1}}`; found {type(data).__name__}"
        )
    if is_accelerate(data):
        return translate(data, path, {key[0]: line for key, line in lines.items() if len(key) == 1})
    return [row for section, fields in data.items() for row in _rows(path, section, fields, lines)]


def _rows(path: Path, section: Any, fields: Any, lines: Mapping[tuple[str, ...], int]) -> list[Row]:
    if not isinstance(fields, Mapping):
        line = lines.get((str(section),))
        raise ConfigError(
            f"{path}{f':{line}' if line else ''}: {section!r} must be a section, a mapping of fields to values; found "
            f"{fields!r}"
        )
    return [
        (str(section), str(field), value, lines.get((str(section), str(field))))
        for field, value in fields.items()
    ]


def _parsed(path: Path, parse: Any) -> Any:
    try:
        return parse(path.read_text())
    except ValueError as error:  # both parsers' errors say line and column
        raise ConfigError(f"{path}: cannot be read: {error}") from error


def _read_yaml(path: Path) -> tuple[Any, dict[tuple[str, ...], int]]:
    try:
        import yaml
    except ImportError as error:
        raise ConfigError(
            f"{path}: YAML needs PyYAML: pip install 'drivetrain-config[yaml]', or write TOML or JSON"
        ) from error
    text = path.read_text()
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    lines: dict[tuple[str, ...], int] = {}
    if isinstance(node, yaml.MappingNode):
        _note_lines(node, (), lines, yaml.MappingNode)
    return {} if data is None else data, lines


def _note_lines(
    node: Any, path: tuple[str, ...], lines: dict[tuple[str, ...], int], mapping: type[Any]
) -> None:
    for key, value in node.value:
        lines[(*path, str(key.value))] = key.start_mark.line + 1
        if isinstance(value, mapping) and not path:
            _note_lines(value, (*path, str(key.value)), lines, mapping)
