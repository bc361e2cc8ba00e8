"""Read the words of every installed command: its flags, their values, whether a file comes next.

No module of a command is run, since its imports may take seconds: the dataclass of its arguments is read from source.
A test holds what is read to the parser's own flags.
"""

import ast
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from drivetrain_config import sections
from drivetrain_config.plugins.installed import EntryPoint
from drivetrain_config.settings.plugin_names import plugin_names
from drivetrain_config.settings.schema import FieldSpec, flags, specs
from drivetrain_config.values.kinds import choices, is_sequence, item_kind, members
from drivetrain_launcher.module_summary import module_summary


@dataclass(frozen=True, slots=True, kw_only=True)
class FlagWords:
    """A flag as a shell completes it.

    Attributes:
        name: The flag, such as "--num-processes".
        about: The description in one sentence.
        takes_value: Whether a value follows.
        choices: The values to offer: those of a closed list, or the names of installed plug-ins.
        is_path: Whether the value is a file or folder.
    """

    name: str
    about: str = ""
    takes_value: bool = True
    choices: tuple[str, ...] = ()
    is_path: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandWords:
    """A command as a shell completes it.

    Attributes:
        name: The words of the command, such as "checkpoint list".
        about: The purpose of the command in one sentence.
        flags: The command's flags, those of sections left out.
        has_sections: Whether the command takes the flags of all sections.
        takes_rest: Whether all words after the first positional argument belong to a script.
        has_positionals: Whether the command takes an argument that is no flag.
    """

    name: str
    about: str
    flags: tuple[FlagWords, ...] = ()
    has_sections: bool = False
    takes_rest: bool = False
    has_positionals: bool = False


def read_commands(found: Mapping[str, EntryPoint]) -> tuple[CommandWords, ...]:
    """Return the words of every command, sorted by name."""
    return tuple(_command(name.replace(".", " "), point) for name, point in sorted(found.items()))


def section_flags() -> tuple[FlagWords, ...]:
    """Return the flags of all installed sections, and `--config`."""
    found = [FlagWords(name="--config", about="File of settings, or none.", is_path=True)]
    for section, kind in sections().items():
        known = {spec.name: spec for spec in specs(kind, section)}
        for flag in flags(kind, section):
            about = flag.help.replace("%%", "%")
            if flag.is_switch:
                found += _switch(flag.name, about)
            else:
                found.append(
                    FlagWords(
                        name=flag.name,
                        about=about,
                        choices=flag.choices or _offered(known[flag.field]),
                        is_path=Path in members(known[flag.field].kind),
                    )
                )
    return tuple(found)


def _offered(spec: FieldSpec) -> tuple[str, ...]:
    """Return the values to offer for a field whose type is not a closed list."""
    if spec.plugins is not None:
        return _plugin_words(spec.plugins, spec.other_words)
    items = choices(item_kind(spec.kind)) if is_sequence(spec.kind) else None
    return tuple(map(str, items or ()))


def _plugin_words(group: str, other_words: Collection[str] = ()) -> tuple[str, ...]:
    """Return the names of installed plug-ins and the other words, without the form `module:Class`."""
    return tuple(word for word in plugin_names(group, other_words) if ":" not in word)


def _switch(name: str, about: str) -> list[FlagWords]:
    return [
        FlagWords(name=name, about=about, takes_value=False),
        FlagWords(name=f"--no-{name[2:]}", about=f"Not: {about}", takes_value=False),
    ]


def _command(name: str, point: EntryPoint) -> CommandWords:
    module, _, attribute = point.value.partition(":")
    own: list[FlagWords] = []
    has_sections = takes_rest = has_positionals = False
    for field, kind, metadata in _arguments(module, attribute):
        if kind == "Layers":
            has_sections = True
        elif metadata.get("rest"):
            takes_rest = True
        elif metadata.get("positional"):
            has_positionals = True
        else:
            own += _flag_words(field, kind, metadata)
    return CommandWords(
        name=name,
        about=module_summary(module),
        flags=tuple(own),
        has_sections=has_sections,
        takes_rest=takes_rest,
        has_positionals=has_positionals,
    )


def _flag_words(field: str, kind: str, metadata: Mapping[str, Any]) -> list[FlagWords]:
    name, about = "--" + field.rstrip("_").replace("_", "-"), str(metadata.get("help", ""))
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


def _arguments(module: str, attribute: str) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Yield name, annotation and metadata of each field of the dataclass that a command's function takes."""
    tree = _tree(module)
    function = next(
        (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == attribute), None
    )
    if function is None or not function.args.args or function.args.args[0].annotation is None:
        return
    found = _class(module, ast.unparse(function.args.args[0].annotation).strip("'\""))
    for node in [] if found is None else found.body:
        if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)):
            continue
        kind = ast.unparse(node.annotation)
        options = _keywords(node.value)
        if kind.startswith("ClassVar") or options.get("init") is False:
            continue
        yield node.target.id, kind, options.get("metadata", {})


def _class(module: str, name: str) -> ast.ClassDef | None:
    """Return the definition of a class, in a module or where the module imports it from."""
    for node in _tree(module).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return node
        if isinstance(node, ast.ImportFrom) and node.module and name in {each.name for each in node.names}:
            return _class(node.module, name)
    return None


def _tree(module: str) -> ast.Module:
    spec = find_spec(module)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return ast.Module(body=[], type_ignores=[])
    with open(spec.origin, encoding="utf-8") as source:
        return ast.parse(source.read())


def _keywords(value: ast.expr | None) -> dict[str, Any]:
    """Return the literal arguments of a call of `field(...)`; in a mapping, those items that are literal."""
    if not isinstance(value, ast.Call):
        return {}
    return {each.arg: _literal(each.value) for each in value.keywords if each.arg is not None}


def _literal(node: ast.expr) -> Any:
    if isinstance(node, ast.Dict):
        return {
            _literal(key): _literal(value)
            for key, value in zip(node.keys, node.values, strict=True)
            if key is not None
        }
    return node.value if isinstance(node, ast.Constant) else None
