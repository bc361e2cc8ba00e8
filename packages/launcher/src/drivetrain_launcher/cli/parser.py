"""Build a parser from a command's dataclass, and parse a command line into the dataclass.

A command's arguments are a frozen dataclass. Each field becomes a flag, named by
`drivetrain_config.settings.schema.flag_name` like the fields of a section, with these exceptions:

- a field of type `Layers` provides the flags of every installed section, and `--config FILE`; with metadata
  `{"finds_file": True}`, a settings file is found without `--config` too; `{"unread": ("launch",)}` names the
  sections that the command does not read, which provide no flags;
- a positional argument may be left out if it has a default; the last one takes several if it is a tuple;
- a repeated argument, a tuple of strings, is a flag that may be given several times;
- an underscore at the end of a field's name, as in `from_`, is not part of its flag;
- an argument for the rest, a tuple of strings, takes all tokens after the positional arguments, unchanged.

`drivetrain_messages.argument` makes such fields.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any, get_origin, get_type_hints

from drivetrain_config import Flag, Layers, environ, flags, sections
from drivetrain_config.files.found_file import choose_file
from drivetrain_config.values.conversion import convert
from drivetrain_launcher.cli.flag_aliases import ours, refusal
from drivetrain_launcher.cli.foreign_flags import ForeignFlags, add_meanings, translator_of
from drivetrain_launcher.cli.given_flags import GivenFlags
from drivetrain_launcher.cli.help_page import Page
from drivetrain_launcher.cli.help_text import OWN, help_text
from drivetrain_launcher.errors import UsageError
from drivetrain_launcher.plan.process_counts import settle_process_counts
from drivetrain_messages import suggest

# The sections whose flags come first in the help.
_FIRST = ("launch", "run")
_SEE_HELP = "--help-all lists what there is"
_CONFIG = Flag(
    name="--config",
    section=OWN,
    field="config",
    is_switch=False,
    choices=None,
    help="File of settings: YAML, TOML or JSON, or one of Accelerate's YAML files; none: not even one that is found.",
    metavar="PATH",
    brief="File of settings; none: not even a found one",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandParser:
    """The parser of one command, whose arguments become a dataclass with fields of these types.

    Attributes:
        groups: The flags by section; the command's own flags under an empty name.
        flags: Every flag by name; a switch also under its `--no-` name.
        positionals: The names of the fields that are positional arguments, in order.
        rest: The name of the field for the rest of the command line, if any.
        layers: The name of the field for the settings of all sections, if any.
        finds_file: Whether the command looks for a settings file if `--config` is not given.
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
    finds_file: bool
    repeated: frozenset[str]

    def parse(self, tokens: Sequence[str]) -> Any:
        """Parse a command line into the command's dataclass; for `--help`, print the help and raise SystemExit."""
        given, words, rest = self._scan(tokens)
        own: dict[str, Any] = {**given.said.pop(OWN, {}), **dict(zip(self.positionals, words, strict=False))}
        for name in self._find_needed():
            if name not in own and name not in (self.rest, self.layers):
                shown = name.upper() if name in self.positionals else _own_flag(name)
                raise UsageError(f"{shown} is missing: {self._find_help(name)}")
        if self.takes_several and len(words) >= len(self.positionals):
            own[self.positionals[-1]] = tuple(words[len(self.positionals) - 1 :])
        elif len(words) > len(self.positionals):
            raise UsageError(f"{words[len(self.positionals)]!r}: not expected here; {_SEE_HELP}")
        values: dict[str, Any] = {}
        for name, text in own.items():
            if name not in self.types:  # --config, which chooses the file below
                continue
            try:
                # Words, and the values of a repeated flag, are taken as they are: a comma in one is part of it.
                values[name] = text if isinstance(text, tuple) else convert(text, self.types[name], text=True)
            except ValueError as error:
                shown = name if name in self.positionals else _own_flag(name)
                raise UsageError(f"{shown} {text}: {error}") from error
        if self.rest is not None:
            values[self.rest] = tuple(rest)
        if self.layers is not None:
            named, file = own.get("config"), None
            if named is not None or self.finds_file:
                file = choose_file(named, environ.child_environment())
            layers = Layers.read(file=file, command_line=given.said, written=given.flags)
            values[self.layers] = settle_process_counts(layers)
        try:
            return self.arguments(**values)
        except ValueError as error:
            raise UsageError(str(error)) from error

    @property
    def takes_several(self) -> bool:
        """True if the last positional argument takes one or more words."""
        return bool(self.positionals) and get_origin(self.types[self.positionals[-1]]) is tuple

    def help(self, page: Page, *, has_all: bool = False) -> str:
        """Return the text of `--help`, or with `has_all` of `--help-all`."""
        needed = self._find_needed()
        words = [name.upper() if name in needed else f"[{name.upper()}]" for name in self.positionals]
        words += [f"[{words[-1]} ...]"] if self.takes_several else []
        rest = [] if self.rest is None else [self.rest]
        return help_text(
            page,
            command=self.command,
            usage=[*words, *(f"[{name.upper()} ...]" for name in rest)],
            summary=self.summary,
            arguments=[(name.upper(), self._find_help(name)) for name in (*self.positionals, *rest)],
            groups=self.groups,
            has_all=has_all,
        )

    def _find_needed(self) -> list[str]:
        """Return the names of the fields without a default."""
        return [
            field.name
            for field in fields(self.arguments)
            if field.default is MISSING and field.default_factory is MISSING
        ]

    def _find_help(self, name: str) -> str:
        return next(field.metadata.get("help", "") for field in fields(self.arguments) if field.name == name)

    def _scan(self, tokens: Sequence[str]) -> tuple[GivenFlags, list[str], list[str]]:
        """Split a command line into flags with their values, positional arguments, and the rest."""
        given = GivenFlags(repeated=self.repeated)
        words: list[str] = []
        foreign: dict[ForeignFlags, dict[str, str]] = {}
        waiting = list(tokens)
        while waiting and not (self.rest is not None and len(words) == len(self.positionals)):
            token = waiting.pop(0)
            if token == "--":  # the next word is no flag, whatever it begins with
                words += waiting[:1]
                del waiting[:1]
            elif token == "-" or not token.startswith("-"):
                words.append(token)
            elif token in ("-h", "--help", "--help-all"):
                sys.stdout.write(self.help(Page.of_terminal(), has_all=token == "--help-all"))
                raise SystemExit(0)
            else:
                self._take(token, waiting, given, foreign)
        add_meanings(foreign, given)
        return given, words, waiting

    def _take(
        self, token: str, waiting: list[str], given: GivenFlags, foreign: dict[ForeignFlags, dict[str, str]]
    ) -> None:
        """Add a flag, with its value from the waiting tokens, to `given` or to another program's flags."""
        written, equals, text = token.partition("=")
        own = self.flags.get(written.replace("_", "-"))
        if self.layers is not None and (own is None or own.section != OWN):
            translator = translator_of(written, self.flags)
            if translator is not None:
                value = text if equals else _next(written, waiting)
                foreign.setdefault(translator, {})[written] = value
                return
        translated = ours(written, self.flags)
        if not translated:
            return
        name, *implied = translated
        flag = self.flags.get(name)
        if flag is None:
            if (reason := refusal(written)) is not None:
                raise UsageError(f"{written}: {reason}")
            names = ", ".join(section for section in self.groups if section != OWN)
            meant = suggest(written.replace("_", "-"), self.flags)
            if not meant and names:
                meant = f"; the installed packages provide those of {names}"
            raise UsageError(f"{written}: no such flag{meant}; {_SEE_HELP}")
        if flag.is_switch:
            if text.lower() not in ("", "true", "false"):
                raise UsageError(
                    f"{written}={text}: {written} takes no value; say {written} alone, or its opposite with --no-"
                )
            given.add(flag, (text.lower() != "false") is (name == flag.name), written=written)
            return
        if implied and equals:
            raise UsageError(f"{token}: {written} takes no value; {written} alone means {name} {implied[0]}")
        value = implied[0] if implied else text if equals else _next(written, waiting, flag)
        if flag.choices is not None and value not in flag.choices:
            raise UsageError(
                f"{written} {value}: no such choice{suggest(value, flag.choices)}; say one of "
                f"{', '.join(flag.choices)}"
            )
        if name == "--num-nodes" and ":" in value:  # a range, as torchrun's --nnodes takes
            least, _, value = value.partition(":")
            given.add(replace(flag, field="min_nodes"), least, written=written)
        elif (name, value) == ("--devices", "all"):
            value = ""
        given.add(flag, value, written=written, is_implied=bool(implied))


def _next(written: str, waiting: list[str], flag: Flag | None = None) -> str:
    """Remove the value of a flag from the waiting tokens and return it."""
    if not waiting or waiting[0].startswith("--"):
        hint = "" if flag is None else f"; {flag.help}"
        raise UsageError(f"{written}: needs a value{hint}")
    return waiting.pop(0)


def build_parser(command: str, arguments: type[Any], summary: str) -> CommandParser:
    """Build the parser of a command from the dataclass of its arguments; `summary` is its purpose."""
    types = get_type_hints(arguments)
    described = fields(arguments)
    positionals = tuple(field.name for field in described if field.metadata.get("positional"))
    rest = next((field.name for field in described if field.metadata.get("rest")), None)
    layers = next((field.name for field in described if types[field.name] is Layers), None)
    own = {
        name: replace(flag, name=name, section=OWN)
        for flag in flags(arguments, command)
        if flag.field not in (*positionals, rest, layers) and (name := _own_flag(flag.field))
    }
    if layers is not None:
        own.setdefault(_CONFIG.name, _CONFIG)  # a command may have its own, to know what was named
    groups = {OWN: tuple(own.values())}
    if layers is not None:
        unread = next(field.metadata.get("unread", ()) for field in described if field.name == layers)
        installed = {name: kind for name, kind in sections().items() if name not in unread}
        for section in sorted(installed, key=lambda name: (name not in _FIRST, name)):
            # A command's own flag hides a section's flag of the same name.
            groups[section] = tuple(
                flag for flag in flags(installed[section], section) if flag.name not in own
            )
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
