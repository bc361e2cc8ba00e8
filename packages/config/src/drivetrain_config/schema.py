"""What a section's dataclass says of itself: flags, JSON schema, a table for the docs, the wizard's questions."""

import dataclasses
from collections.abc import Mapping
from dataclasses import MISSING, dataclass
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from drivetrain_config.conversion import describe, field_types

# Sections whose flags stand without the section's name: what every launch says.
_BARE_SECTIONS = ("launch", "run")


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldSpec:
    """One field of a section.

    Attributes:
        section: The section's name.
        name: The field's name.
        kind: Its type.
        default: Its default; MISSING if it has none.
        help: One sentence, with units.
        secret: Whether its value is shown and handed on nowhere.
        choices: What may be said, where that is a closed list.
    """

    section: str
    name: str
    kind: Any
    default: Any
    help: str
    secret: bool
    choices: tuple[Any, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """One command-line flag.

    Attributes:
        name: Such as "--num-processes".
        section: The section it sets.
        field: The field it sets.
        is_switch: Whether it is a bool, with a `--no-` form and no value.
        choices: What may be said, where that is a closed list.
        help: One sentence; "%" is doubled, as argparse wants it.
    """

    name: str
    section: str
    field: str
    is_switch: bool
    choices: tuple[str, ...] | None
    help: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One question of a wizard.

    Attributes:
        section: The section it fills.
        field: The field it fills.
        text: The question.
        default: What an empty answer means.
        choices: The answers there are, where that is a closed list.
        secret: Whether the answer must not be echoed.
    """

    section: str
    field: str
    text: str
    default: Any
    choices: tuple[str, ...] | None
    secret: bool


def specs(section_type: type[Any], section: str) -> tuple[FieldSpec, ...]:
    """Read a section's dataclass."""
    types = field_types(section_type)
    found: list[FieldSpec] = []
    for field in dataclasses.fields(section_type):
        factory = field.default_factory
        default = field.default if field.default is not MISSING or factory is MISSING else factory()
        found.append(
            FieldSpec(
                section=section,
                name=field.name,
                kind=types[field.name],
                default=default,
                help=field.metadata.get("help", ""),
                secret=bool(field.metadata.get("secret", False)),
                choices=_choices(types[field.name]),
            )
        )
    return tuple(found)


def flag_name(section: str, field: str) -> str:
    """The flag of a field: bare for launch and run, with the section's name for all others."""
    words = [field] if section in _BARE_SECTIONS else [section, field]
    return "--" + "-".join(words).replace("_", "-")


def flags(section_type: type[Any], section: str) -> tuple[Flag, ...]:
    """The command-line flags of a section; secret fields have none, for the process list shows them."""
    return tuple(
        Flag(
            name=flag_name(section, spec.name),
            section=section,
            field=spec.name,
            is_switch=spec.kind is bool,
            choices=None if spec.choices is None else tuple(map(str, spec.choices)),
            help=f"{spec.help} (default: {_shown(spec.default)})".replace("%", "%%"),
        )
        for spec in specs(section_type, section)
        if not spec.secret
    )


def json_schema(section_type: type[Any], section: str) -> dict[str, Any]:
    """The section as JSON schema, for editors."""
    properties = {
        spec.name: {
            **_schema_of(spec.kind),
            "description": spec.help,
            **({} if spec.default is MISSING else {"default": _plain(spec.default)}),
        }
        for spec in specs(section_type, section)
    }
    return {"title": section, "type": "object", "additionalProperties": False, "properties": properties}


def markdown_table(section_type: type[Any], section: str) -> str:
    """The section as a table for the docs."""
    lines = ["| field | type | default | what it does |", "|---|---|---|---|"]
    lines += [
        f"| `{spec.name}` | {describe(spec.kind)} | `{_shown(spec.default)}` | {spec.help} |".replace(
            "\n", " "
        )
        for spec in specs(section_type, section)
    ]
    return "\n".join(lines)


def questions(section_type: type[Any], section: str) -> tuple[Question, ...]:
    """The section as questions."""
    return tuple(
        Question(
            section=section,
            field=spec.name,
            text=f"{spec.help[:1].upper()}{spec.help[1:]}?",
            default=None if spec.default is MISSING else spec.default,
            choices=None if spec.choices is None else tuple(map(str, spec.choices)),
            secret=spec.secret,
        )
        for spec in specs(section_type, section)
    )


def _members(kind: Any) -> tuple[Any, ...]:
    return (
        tuple(m for m in get_args(kind) if m is not NoneType)
        if get_origin(kind) in (Union, UnionType)
        else (kind,)
    )


def _choices(kind: Any) -> tuple[Any, ...] | None:
    members = _members(kind)
    if len(members) == 1 and get_origin(members[0]) is Literal:
        return get_args(members[0])
    if len(members) == 1 and isinstance(members[0], type) and issubclass(members[0], Enum):
        return tuple(member.value for member in members[0])
    return None


def _schema_of(kind: Any) -> dict[str, Any]:
    if get_origin(kind) in (Union, UnionType):
        return {"anyOf": [_schema_of(member) for member in get_args(kind)]}
    if (choices := _choices(kind)) is not None:
        return {"enum": list(choices)}
    if get_origin(kind) in (tuple, list):
        return (
            {"type": "array", "items": _schema_of(get_args(kind)[0])} if get_args(kind) else {"type": "array"}
        )
    names = {
        bool: "boolean",
        int: "integer",
        float: "number",
        str: "string",
        Path: "string",
        NoneType: "null",
    }
    return {"type": names.get(kind, "object")}


def _plain(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Enum):
        return value.value
    return str(value) if isinstance(value, Path) else value


def _shown(value: Any) -> str:
    if value is MISSING:
        return "none, must be given"
    if value is None:
        return "not set"
    return "empty" if value in ((), [], {}) else str(_plain(value))
