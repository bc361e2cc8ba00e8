"""Read the words of every installed command: its flags, their values, whether a file comes next.

No module of a command is run, since its imports may take seconds: the dataclass of its arguments is read from source.
A test compares the words with the parser's own flags.
"""

import ast
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drivetrain_config import sections
from drivetrain_config.plugins.installed import EntryPoint
from drivetrain_config.settings.plugin_names import plugin_names
from drivetrain_config.settings.schema import flags, specs
from drivetrain_config.values.kinds import choices, is_sequence, item_kind, members
from drivetrain_launcher.cli.command_arguments import find_argument_class, find_function
from drivetrain_launcher.module_summary import module_summary


@dataclass(frozen=True, slots=True, kw_only=True)
class FlagWords:
    """A flag, such as "--num-processes", as a shell completes it.

    `choices` are the values to offer: a closed list, or the names of installed plug-ins. `is_path` says
    whether the value is a file or folder.
    """

    name: str
    about: str = ""
    takes_value: bool = True
    choices: tuple[str, ...] = ()
    is_path: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandWords:
    """A command, such as "checkpoint list", as a shell completes it.

    `flags` are the command's own flags; with `has_sections` the command takes the flags of all sections too. With
    `takes_rest`, all words after the first positional argument belong to a script.
    """

    name: str
    about: str
    flags: tuple[FlagWords, ...] = ()
    has_sections: bool = False
    takes_rest: bool = False
    has_positionals: bool = False


def read_commands(found: Mapping[str, EntryPoint]) -> tuple[CommandWords, ...]:
    """Return the words of every command, sorted by name."""
    commands: list[CommandWords] = []
    for name, point in sorted(found.items()):
        module, _, function = point.value.partition(":")
        fields = _argument_fields(module, function)
        own = [
            flag
            for field, kind, metadata in fields
            if kind != "Layers" and not (metadata.get("rest") or metadata.get("positional"))
            for flag in _flag_words(field, kind, metadata)
        ]
        commands.append(
            CommandWords(
                name=name.replace(".", " "),
                about=module_summary(module),
                flags=tuple(own),
                has_sections=any(kind == "Layers" for _, kind, _ in fields),
                takes_rest=any(metadata.get("rest") for *_, metadata in fields),
                has_positionals=any(metadata.get("positional") for *_, metadata in fields),
            )
        )
    return tuple(commands)


def section_flags() -> tuple[FlagWords, ...]:
    """Return the flags of all installed sections, and `--config`."""
    found = [FlagWords(name="--config", about="File of settings, or none.", is_path=True)]
    for section, kind in sections().items():
        known = {spec.name: spec for spec in specs(kind, section)}
        for flag in flags(kind, section):
            spec, about = known[flag.field], flag.help
            if flag.is_switch:
                found += _switch(flag.name, about)
                continue
            offered = flag.choices or ()
            if spec.plugins is not None:
                offered = _plugin_words(spec.plugins, spec.other_words)
            elif not offered and is_sequence(spec.kind):
                offered = tuple(map(str, choices(item_kind(spec.kind)) or ()))
            is_path = Path in members(spec.kind)
            found.append(FlagWords(name=flag.name, about=about, choices=offered, is_path=is_path))
    return tuple(found)


def _plugin_words(group: str, other_words: Collection[str] = ()) -> tuple[str, ...]:
    """Return the names of installed plug-ins and the `other_words`, but not the form `module:Class`."""
    return tuple(word for word in plugin_names(group, other_words) if ":" not in word)


def _switch(name: str, about: str) -> list[FlagWords]:
    return [
        FlagWords(name=name, about=about, takes_value=False),
        FlagWords(name=f"--no-{name[2:]}", about=f"Not: {about}", takes_value=False),
    ]


def _flag_words(field: str, kind: str, metadata: Mapping[str, Any]) -> list[FlagWords]:
    name, about = "--" + field.rstrip("_").replace("_", "-"), metadata.get("help") or ""
    if kind.replace(" | None", "") == "bool":
        return _switch(name, about)
    parts = [part.strip() for part in kind.split("|")]
    # A list of choices too, as in tuple[Literal["a", "b"], ...].
    listed = [found for part in parts for found in re.findall(r"Literal\[(.*?)\]", part)]
    values = [str(value) for each in listed for value in ast.literal_eval(f"[{each}]")]
    values += ["none"] if listed and "None" in parts and "none" not in values else []
    if group := metadata.get("plugins"):
        values += _plugin_words(group)
    return [FlagWords(name=name, about=about, choices=tuple(values), is_path="Path" in parts)]


def _argument_fields(module: str, function: str) -> list[tuple[str, str, Mapping[str, Any]]]:
    """Return name, annotation and metadata of each field of the dataclass that a command's function takes."""
    found = find_argument_class(module, find_function(module, function))
    fields: list[tuple[str, str, Mapping[str, Any]]] = []
    for node in [] if found is None else found[1].body:
        if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)):
            continue
        call, metadata = node.value, dict[str, Any]()
        if isinstance(call, ast.Call):
            metadata = {each.arg: _literal(each.value) for each in call.keywords if each.arg is not None}
            metadata |= zip(("help",), map(_literal, call.args[1:]), strict=False)  # of `argument`
        kind = ast.unparse(node.annotation)
        if not kind.startswith("ClassVar") and metadata.get("init") is not False:
            fields.append((node.target.id, kind, {**metadata, **(metadata.get("metadata") or {})}))
    return fields


def _literal(node: ast.expr) -> Any:
    """Return the value of a literal expression, or the literal items of a mapping; None for other expressions."""
    if isinstance(node, ast.Dict):
        return {
            _literal(key): _literal(value)
            for key, value in zip(node.keys, node.values, strict=True)
            if key is not None
        }
    return node.value if isinstance(node, ast.Constant) else None
