"""Generate flags, a JSON schema, a table for the docs and wizard questions from a section's dataclass."""

from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from types import NoneType
from typing import Any, cast, get_args

from drivetrain_config.settings.advice import Ask
from drivetrain_config.values.kinds import (
    choices,
    describe,
    field_types,
    holds_secret,
    is_mapping,
    is_optional,
    is_sequence,
    is_union,
    item_kind,
    item_kinds,
    members,
    plain,
    shown,
)

# Sections whose flags omit the section's name, as every launch uses them.
_BARE_SECTIONS = ("launch", "run")
_JSON_TYPES = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    Path: "string",
    NoneType: "null",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldSpec:
    """A field of a section.

    Attributes:
        default: The field's default; MISSING if it has none.
        help: The description in one sentence, with units.
        secret: Whether the value is masked in messages and never passed to other processes.
        ask: The function that decides whether a wizard asks for the field, or the function's place; may be None.
        plugins: The entry point group whose names are the values of the field; None if the values name no plug-ins.
        other_words: The values besides plug-in names, such as "auto"; `module:Class` stands for every such pair.
        is_json_file: Whether a path among the values names a JSON file, which a launch checks before ranks start.
        brief: The line of the flag in a short help; by default, the first clause of `help`.
        topic: The heading of that line; empty for a field that says no brief, which the whole help alone has.
    """

    section: str
    name: str
    kind: Any
    default: Any
    help: str
    secret: bool
    ask: Ask | str | None = None
    plugins: str | None = None
    other_words: tuple[str, ...] = ()
    is_json_file: bool = False
    brief: str = ""
    topic: str = ""

    @property
    def shown_default(self) -> str:
        """The default, formatted for a line of help or a table."""
        if self.default is MISSING:
            return "none, must be given"
        if isinstance(self.default, tuple) and self.default:
            return ",".join(map(shown, cast("tuple[Any, ...]", self.default)))
        return "***" if self.secret and self.default is not None else shown(self.default)

    @property
    def metavar(self) -> str:
        """The word that stands for a value in the help."""
        kinds = members(self.kind)
        if is_list := is_sequence(kinds[0]):
            kinds = members(item_kind(kinds[0]))
        word = "N" if int in kinds else "PATH" if Path in kinds else "NAME" if self.plugins else ""
        if not word or (str in kinds and not self.plugins):
            return self.name.strip("_").rpartition("_")[2].upper()
        return f"{word},..." if is_list else word

    @property
    def words(self) -> tuple[str, ...] | None:
        """The allowed values as text if the type is a closed list; else None."""
        known = choices(self.kind)
        if known is None:
            return None
        # A type that has the word "none" of its own reads it as that word, and not as null.
        return tuple(dict.fromkeys([*map(str, known), *(["none"] if is_optional(self.kind) else [])]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """A command-line flag.

    Attributes:
        name: The flag itself, such as "--num-processes".
        is_switch: Whether the field is a bool: the flag takes no value and has a negative form, `--no-...`.
        choices: The allowed values if the type is a closed list; else None.
        help: The description in one sentence, with the default.
        brief: The description in a few words, for a short help.
        topic: The heading of the flag in a short help; empty for a flag that a short help leaves out.
        is_on: Whether the default of a switch is true.
    """

    name: str
    section: str
    field: str
    is_switch: bool
    choices: tuple[str, ...] | None
    help: str
    metavar: str = ""
    brief: str = ""
    topic: str = ""
    is_on: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A question of a wizard.

    Attributes:
        default: The value for an empty answer.
        secret: Whether the answer must not be echoed.
        ask: The function that decides whether to ask and what to recommend, or the function's place; may be None.
    """

    section: str
    field: str
    text: str
    default: Any
    choices: tuple[str, ...] | None
    secret: bool
    ask: Ask | str | None = None


def specs(section_type: type[Any], section: str) -> tuple[FieldSpec, ...]:
    """Return the fields of a section's dataclass."""
    types = field_types(section_type)
    return tuple(
        FieldSpec(
            section=section,
            name=field.name,
            kind=types[field.name],
            default=field.default if field.default_factory is MISSING else field.default_factory(),
            help=field.metadata.get("help", ""),
            secret=bool(field.metadata.get("secret")) or holds_secret(types[field.name]),
            ask=field.metadata.get("ask"),
            plugins=field.metadata.get("plugins"),
            other_words=tuple(field.metadata.get("other_words", ())),
            is_json_file=bool(field.metadata.get("json_file")),
            brief=field.metadata.get("brief") or field.metadata.get("help", "").partition(";")[0].rstrip("."),
            topic=(field.metadata.get("topic") or section) if field.metadata.get("brief") else "",
        )
        for field in fields(section_type)
        if field.init
    )


def flag_name(section: str, field: str, *, negated: bool = False) -> str:
    """Return the flag of a field, with the section's name except for launch and run."""
    words = [field] if section in _BARE_SECTIONS else [section, field]
    return "--" + "-".join(["no", *words] if negated else words).replace("_", "-")


def flags(section_type: type[Any], section: str) -> tuple[Flag, ...]:
    """Return a section's flags; secret fields have no flag, since all users of a machine see its command lines.

    Example:
        >>> @dataclass(frozen=True)
        ... class LoggingSettings:
        ...     every_steps: int = 10
        >>> [flag.name for flag in flags(LoggingSettings, section="logging")]
        ['--logging-every-steps']
    """
    return tuple(
        Flag(
            name=flag_name(section, spec.name),
            section=section,
            field=spec.name,
            is_switch=members(spec.kind) == (bool,),
            choices=spec.words,
            help=f"{spec.help.rstrip('.')} (default: {spec.shown_default})",
            metavar=spec.metavar,
            brief=_brief(spec),
            topic=spec.topic,
            is_on=spec.default is True,
        )
        for spec in specs(section_type, section)
        if not spec.secret
    )


def _brief(spec: FieldSpec) -> str:
    """Return the line of a short help, with a default that says something."""
    says_nothing = spec.default in (MISSING, None, (), "") or isinstance(spec.default, bool)
    return spec.brief if says_nothing else f"{spec.brief} (default: {spec.shown_default})"


def json_schema(section_type: type[Any], section: str) -> dict[str, Any]:
    """Return the JSON schema of a section, for editors."""
    return {"title": section, **_schema_of_dataclass(section_type)}


def markdown_table(section_type: type[Any], section: str) -> str:
    """Return a table of a section for the docs; a secret field has no flag."""
    lines = ["| field | flag | type | default | what it does |", "|---|---|---|---|---|"]
    for spec in specs(section_type, section):
        flag = "" if spec.secret else f"`{flag_name(section, spec.name)}`"
        cells = (f"`{spec.name}`", flag, describe(spec.kind), f"`{spec.shown_default}`", spec.help)
        lines.append(f"| {' | '.join(' '.join(cell.split()).replace('|', '&#124;') for cell in cells)} |")
    return "\n".join(lines)


def questions(section_type: type[Any], section: str) -> tuple[Prompt, ...]:
    """Return the wizard questions of a section, in the order of its fields."""
    return tuple(
        Prompt(
            section=section,
            field=spec.name,
            text=f"{spec.help[:1].upper()}{spec.help[1:].rstrip('.')}?",
            default=spec.default,
            choices=spec.words,
            secret=spec.secret,
            ask=spec.ask,
        )
        for spec in specs(section_type, section)
    )


def _schema_of_dataclass(kind: type[Any]) -> dict[str, Any]:
    properties: dict[str, Any] = {}
    for spec in specs(kind, ""):
        properties[spec.name] = _schema_of(spec.kind)
        if spec.help:
            properties[spec.name]["description"] = spec.help
        if spec.default is not MISSING and not spec.secret:
            properties[spec.name]["default"] = plain(spec.default)
    required = [spec.name for spec in specs(kind, "") if spec.default is MISSING]
    schema: dict[str, Any] = {"type": "object", "additionalProperties": False, "properties": properties}
    return {**schema, "required": required} if required else schema


def _schema_of(kind: Any) -> dict[str, Any]:
    if kind is Any:
        return {}
    if is_union(kind):
        return {"anyOf": [_schema_of(member) for member in get_args(kind)]}
    if (known := choices(kind)) is not None:
        return {"enum": [plain(choice) for choice in known]}
    if is_sequence(kind):
        fixed = item_kinds(kind)
        if fixed is None:
            return {"type": "array", "items": _schema_of(item_kind(kind))}
        items = [_schema_of(each) for each in fixed]
        return {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}
    if is_dataclass(kind):
        return _schema_of_dataclass(kind)  # pyright: ignore[reportArgumentType]  # a type, not an instance
    if is_mapping(kind):
        return {"type": "object", "additionalProperties": _schema_of(item_kind(kind))}
    return {"type": _JSON_TYPES[kind]} if kind in _JSON_TYPES else {}
