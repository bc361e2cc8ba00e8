"""Read settings files: YAML, TOML or JSON, a mapping of sections to mappings of fields, with their lines."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from drivetrain_config.errors import ConfigError
from drivetrain_config.files.file_text import parse_json, read_text, too_deep
from drivetrain_config.files.yaml_file import Lines, read_yaml
from drivetrain_config.plugins.installed import entry_points
from drivetrain_config.values.kinds import check_depth
from drivetrain_messages import suggest


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """The contents of a settings file.

    Attributes:
        data: The sections by name, not yet checked.
        lines: The line numbers of sections and fields; empty if the parser does not report them.
        notices: The notices, one line each, of another program's options that drivetrain fulfils differently.
    """

    path: Path
    data: Mapping[str, Any]
    lines: Lines
    notices: tuple[str, ...] = ()

    def where(self, section: str, field: str | None = None) -> str:
        """Return the file's path, with the line of a section or field if known."""
        keys = [(section,)] if field is None else [(section, field), (section,)]
        line = next((self.lines[key] for key in keys if key in self.lines), None)
        return str(self.path) if line is None else f"{self.path}:{line}"


# Returns the sections that another program's file means; None for any other file.
FileFormat = Callable[[Contents], Contents | None]
_FORMATS = "drivetrain.file_formats"


def read_file(path: Path) -> Contents:
    """Read a settings file, ending in .yaml, .yml, .toml or .json.

    The file holds sections, or is another program's file that an installed package translates (entry points of the
    group `drivetrain.file_formats`). ConfigError, with the line, if the file cannot be read.
    """
    data, lines = _parse(path)
    if data is None:
        data = {}
    if not isinstance(data, Mapping):
        raise ConfigError(f"{path}: must hold sections, as in `run: {{seed: 1}}`; it holds {_kind(data)}")
    contents = Contents(path=path, data={str(key): value for key, value in data.items()}, lines=lines)
    for point in entry_points(_FORMATS):
        translated = cast("FileFormat", point.load())(contents)
        if translated is not None:
            return translated
    marks = [contents.data.get(mark) for mark in ("compute_environment", "distributed_type")]
    if any(isinstance(mark, str) for mark in marks):
        raise ConfigError(f"{path} is an Accelerate file: install drivetrain-migration, which reads it")
    return contents


def _parse(path: Path) -> tuple[Any, Lines]:
    def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        if twice := [key for key in dict.fromkeys(keys) if keys.count(key) > 1]:
            raise ConfigError(f"{path}: says {twice[0]!r} twice in one mapping; keep one")
        return dict(pairs)

    match path.suffix.lower():
        case ".yaml" | ".yml":
            return read_yaml(path, _text(path))
        case ".json":
            return _parse_json(path, object_pairs_hook=without_duplicates), {}
        case ".toml":
            import tomllib

            try:
                return check_depth(tomllib.loads(_text(path))), {}
            except RecursionError:
                raise too_deep(path) from None
            except tomllib.TOMLDecodeError as error:
                raise ConfigError(f"{path}: cannot be read as TOML: {error}") from error
        case suffix:
            raise ConfigError(
                f"{path}: a file of settings ends in .yaml, .yml, .toml or .json, not in {suffix!r}"
            )


def _text(path: Path) -> str:
    try:
        return read_text(path)
    except FileNotFoundError:
        beside = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        meant = suggest(path.name, beside, likeness=0.75, show=path.with_name)
        raise ConfigError(f"{path}: no such file{meant}") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text: {error}") from error


def check_json_object(path: Path) -> None:
    """Check that a file holds a JSON object, of any content."""
    found = _parse_json(path)
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: must hold a JSON object; it holds {_kind(found)}")


def _parse_json(path: Path, object_pairs_hook: Callable[[list[tuple[str, Any]]], Any] = dict) -> Any:
    text = _text(path)
    try:
        return parse_json(path, text, object_pairs_hook=object_pairs_hook)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}:{error.lineno}: cannot be read as JSON: {error.msg}") from error


def _kind(data: object) -> str:
    return "a list" if isinstance(data, list) else f"a single value of type {type(data).__name__}"
