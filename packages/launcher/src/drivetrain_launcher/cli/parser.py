"""Build a parser from a command's dataclass, and parse a command line into the dataclass.

A command's arguments are a frozen dataclass. Each field becomes a flag, like the fields of a section, whose names
`drivetrain_config.settings.schema.flag_name` makes, except that:

- a field of type `Layers` provides the flags of every installed section, and `--config FILE`; with metadata
  `{"finds_file": True}`, a settings file is found without `--config` too;
- a field with metadata `{"positional": True}` is a positional argument, which may be left out if it has a default;
  the last one takes several if it is a tuple;
- a field with metadata `{"repeated": True}`, a tuple of strings, is a flag that may be given several times;
- an underscore at the end of a field's name, as in `from_`, is not part of its flag;
- a field with metadata `{"rest": True}`, a tuple of strings, takes all tokens after the positional arguments,
  unchanged.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any, get_origin, get_type_hints

from drivetrain_config import Flag, Layers, environ, flags, sections
from drivetrain_config.files.found_file import SettingsFile, choose_file
from drivetrain_config.values.conversion import convert
from drivetrain_launcher.cli.flag_aliases import node_range, ours, refusal
from drivetrain_launcher.cli.foreign_flags import ForeignFlags, add_meanings, translator_of
from drivetrain_launcher.cli.given_flags import GivenFlags
from drivetrain_launcher.errors import UsageError
from drivetrain_launcher.plan.process_counts import settle_process_counts
from drivetrain_messages import suggest

# The key of the command's own flags, among the names of sections.
_OWN = ""


# The sections whose flags come first in the help.
_FIRST = ("launch", "run")

_SEE_HELP = "--help lists what there is"

_CONFIG = Flag(
    name="--config",
    section=_OWN,
    field="config",
    is_switch=False,
    choices=None,
    help="File of settings: YAML, TOML or JSON, or one of Accelerate's YAML files; none: not even one that is found.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandParser:
    """The parser of one command.

    Attributes:
        command: The name of the command.
        summary: The purpose of the command, in a sentence.
        arguments: The dataclass of its arguments.
        types: The types of the dataclass's fields.
        groups: The flags by section; the command's own flags under an empty name.
        flags: Every flag by name; a switch also under its `--no-` name.
        positionals: The names of the fields that are positional arguments, in order.
        rest: The name of the field for the rest of the command line, if any.
        layers: The name of the field for the settings of all sections, if any.
        finds_file: Whether a settings file is used that `--config` does not name.
        repeated: The names of the fields whose flags may be given several times.
    """

    command: str
    summary: str
    arguments: type[Any]
    types: Mapping[str, Any]
    groups: Mapping[str, tuple[Flag, ...]]
    flags: Mapping[str, Flag]
    positionals: tuple[str, ...]
    rest: str | None
    layers: str | None
    finds_file: bool = False
    repeated: frozenset[str] = frozenset()

    def parse(self, tokens: Sequence[str]) -> Any:
        """Parse a command line into the command's dataclass.

        Raises:
            UsageError: If a flag is unknown or lacks its value, or an argument is missing or invalid.
            ConfigError: If the settings file cannot be read.
            SystemExit: After `--help` has been printed.
        """
        given, plain, rest = self._scan(tokens)
        missing = [name for name in self.positionals[len(plain) :] if name in self._needed()]
        if missing:
            raise UsageError(f"{missing[0].upper()} is missing: {self._help_of(missing[0])}")
        if len(plain) > len(self.positionals) and not self.takes_several:
            raise UsageError(f"{plain[len(self.positionals)]!r}: not expected here; {_SEE_HELP}")
        own = {**given.said.pop(_OWN, {}), **dict(zip(self.positionals, plain, strict=False))}
        # A value of a repeated flag is not converted: a comma in it is part of it.
        values = {
            name: tuple(text) if name in self.repeated else self._converted(name, text)
            for name, text in own.items()
            if name in self.types
        }
        if self.takes_several and plain:
            # Not converted: a comma in a word is part of it, and would divide the value of a flag.
            values[self.positionals[-1]] = tuple(plain[len(self.positionals) - 1 :])
        if self.rest is not None:
            values[self.rest] = tuple(rest)
        if self.layers is not None:
            file = self._file(own.get("config"))
            layers = Layers.read(file=file, command_line=given.said, written=given.flags)
            values[self.layers] = settle_process_counts(layers)
        self._check_given(values)
        try:
            return self.arguments(**values)
        except ValueError as error:
            raise UsageError(str(error)) from error

    @property
    def takes_several(self) -> bool:
        """True if the last positional argument takes one or more words."""
        return bool(self.positionals) and get_origin(self.types[self.positionals[-1]]) is tuple

    def _file(self, named: object) -> SettingsFile | None:
        """Return the settings file that `--config` names, or that is found."""
        if named is None and not self.finds_file:
            return None
        return choose_file(None if named is None else str(named), environ.child_environment())

    def _needed(self) -> dict[str, str]:
        """Return the fields without a default, with the help of each."""
        return {
            field.name: field.metadata.get("help", "")
            for field in fields(self.arguments)
            if field.default is MISSING and field.default_factory is MISSING
        }

    def _check_given(self, values: Mapping[str, Any]) -> None:
        for name, text in self._needed().items():
            if name not in values:
                raise UsageError(f"{_own_flag(name)} is missing: {text}")

    def _scan(self, tokens: Sequence[str]) -> tuple[GivenFlags, list[str], list[str]]:
        """Split a command line into flags with their values, positional arguments, and the rest."""
        given = GivenFlags(repeated=self.repeated)
        plain: list[str] = []
        foreign: dict[ForeignFlags, dict[str, str]] = {}
        waiting = list(tokens)
        while waiting and not (self.rest is not None and len(plain) == len(self.positionals)):
            token = waiting.pop(0)
            if token == "--" or not token.startswith("-") or token == "-":
                plain += waiting[:1] if token == "--" else [token]
                waiting = waiting[1:] if token == "--" else waiting
                continue
            if token in ("-h", "--help"):
                sys.stdout.write(self.help_text())
                raise SystemExit(0)
            written, equals, text = token.partition("=")
            if (translator := self._translator_of(written)) is not None:
                value = text if equals else _next(written, waiting)
                foreign.setdefault(translator, {})[written] = value
            else:
                self._take(token, waiting, given)
        add_meanings(foreign, given)
        return given, plain, waiting

    def _translator_of(self, written: str) -> ForeignFlags | None:
        """Return what translates another program's flag; None for other flags and the command's own."""
        own = self.flags.get(written.replace("_", "-"))
        if self.layers is None or (own is not None and own.section == _OWN):
            return None
        return translator_of(written, self.flags)

    def _take(self, token: str, waiting: list[str], given: GivenFlags) -> None:
        """Parse one flag, with its value from the waiting tokens, into `given`."""
        written, equals, text = token.partition("=")
        translated = ours(written, self.flags)
        if not translated:
            return
        name, *implied = translated
        flag = self.flags.get(name)
        if flag is None:
            raise UsageError(self._unknown(written))
        value: str | bool
        if flag.is_switch:
            value = _truth(written, text or "true") is (name == flag.name)
        elif implied:
            value = implied[0]
            if equals:
                raise UsageError(f"{token}: takes no value; {written} alone means {name} {value}")
        else:
            value = text if equals else _next(written, waiting, flag)
        if flag.choices is not None and value not in flag.choices:
            meant = suggest(str(value), flag.choices)
            raise UsageError(
                f"{written} {value}: no such choice{meant}; say one of {', '.join(flag.choices)}"
            )
        if isinstance(value, str) and (meant := node_range(name, value)) is not None:
            for part, text in meant.items():
                given.add(replace(flag, field=part), text, written=written)
            return
        given.add(
            flag,
            "" if (name, value) == ("--devices", "all") else value,
            written=written,
            is_implied=bool(implied),
        )

    def _unknown(self, written: str) -> str:
        reason = refusal(written)
        if reason is not None:
            return f"{written}: {reason}"
        sections = ", ".join(dict.fromkeys(flag.section for flag in self.flags.values() if flag.section))
        meant = suggest(written.replace("_", "-"), self.flags)
        if not meant and sections:
            meant = f"; the installed packages provide those of {sections}"
        return f"{written}: no such flag{meant}; {_SEE_HELP}"

    def _converted(self, name: str, given: object) -> Any:
        try:
            return convert(given, self.types[name], text=True)
        except ValueError as error:
            shown = name if name in self.positionals else _own_flag(name)
            raise UsageError(f"{shown} {given}: {error}") from error

    def _help_of(self, name: str) -> str:
        return next(field.metadata.get("help", "") for field in fields(self.arguments) if field.name == name)

    def help_text(self) -> str:
        """Return the text for `--help`."""
        from argparse import ArgumentParser

        needed = self._needed()
        shown = [_metavar(n) if n in needed else f"[{_metavar(n)}]" for n in self.positionals]
        shown += [f"[{shown[-1]} ...]"] if self.takes_several else []
        shown += [] if self.rest is None else [f"[{_metavar(self.rest)} ...]"]
        usage = " ".join([f"drivetrain {self.command} [flags]", *shown])
        parser = ArgumentParser(description=self.summary, usage=usage, add_help=False)
        for name in (*self.positionals, *([] if self.rest is None else [self.rest])):
            parser.add_argument(_metavar(name), help=self._help_of(name))
        for name, flags_of_section in self.groups.items():
            group = parser.add_argument_group("flags" if name == _OWN else f"the {name} section")
            for flag in flags_of_section:
                if flag.is_switch:
                    group.add_argument(f"--[no-]{flag.name[2:]}", help=flag.help, action="store_true")
                else:
                    choices = None if flag.choices is None else "{" + ",".join(flag.choices) + "}"
                    group.add_argument(flag.name, help=flag.help, metavar=choices or _metavar(flag.field))
        return parser.format_help()


def _next(written: str, waiting: list[str], flag: Flag | None = None) -> str:
    """Remove the value of a flag from the waiting tokens and return it."""
    if not waiting or waiting[0].startswith("--"):
        hint = "" if flag is None else f"; {flag.help.replace('%%', '%')}"
        raise UsageError(f"{written}: needs a value{hint}")
    return waiting.pop(0)


def _metavar(name: str) -> str:
    return name.upper()


def _truth(written: str, text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise UsageError(f"{written}={text}: is a switch; say {written} alone, or its opposite with --no-")
    return text.lower() == "true"


def build_parser(command: str, arguments: type[Any], summary: str) -> CommandParser:
    """Build the parser of a command.

    Args:
        command: The name of the command.
        arguments: The dataclass of its arguments.
        summary: The purpose of the command, in a sentence.
    """
    types = get_type_hints(arguments)
    described = fields(arguments)
    positionals = tuple(field.name for field in described if field.metadata.get("positional"))
    rest = next((field.name for field in described if field.metadata.get("rest")), None)
    layers = next((field.name for field in described if types[field.name] is Layers), None)
    special = {*positionals, rest, layers}
    groups: dict[str, tuple[Flag, ...]] = {
        _OWN: tuple(
            replace(flag, name=_own_flag(flag.field), section=_OWN)
            for flag in flags(arguments, command)
            if flag.field not in special
        )
    }
    if layers is not None:
        if all(
            flag.name != _CONFIG.name for flag in groups[_OWN]
        ):  # a command may want to know what was named
            groups[_OWN] += (_CONFIG,)
        installed = sections()
        names = sorted(installed, key=lambda name: (name not in _FIRST, name))
        # A command's own flag hides a section's flag of the same name.
        own = {flag.name for flag in groups[_OWN]}
        groups |= {
            name: tuple(f for f in flags(installed[name], name) if f.name not in own) for name in names
        }
    found = {flag.name: flag for group in groups.values() for flag in group}
    found |= {f"--no-{name[2:]}": flag for name, flag in found.items() if flag.is_switch}
    return CommandParser(
        command=command,
        summary=summary,
        arguments=arguments,
        types=types,
        groups=groups,
        flags=found,
        positionals=positionals,
        rest=rest,
        layers=layers,
        finds_file=any(field.metadata.get("finds_file", False) for field in described),
        repeated=frozenset(field.name for field in described if field.metadata.get("repeated")),
    )


def _own_flag(field: str) -> str:
    """Return the flag of a command's own field."""
    return "--" + field.rstrip("_").replace("_", "-")
