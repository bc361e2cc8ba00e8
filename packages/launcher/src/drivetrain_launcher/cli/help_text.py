"""Draw the help of a command: all of its flags, or, of many, those that people use, a line each."""

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from drivetrain_config import Flag
from drivetrain_launcher.cli.help_page import Page

if TYPE_CHECKING:
    from drivetrain_launcher.cli.parser import CommandParser

# The key of the command's own flags, among the names of sections.
OWN = ""
# A command with more flags has a short help.
_MOST_FLAGS = 20
_COLUMN = 24


def help_text(parser: "CommandParser", page: Page, *, has_all: bool = False) -> str:
    """Return the text of `--help`, or with `has_all` of `--help-all`.

    If a command has more than 20 flags, `--help` shows the command's own, and those of sections whose fields have a
    `brief` in their metadata.
    """
    words = [name.upper() for name in parser.positionals]
    shown = [word if word.lower() in parser.needed else f"[{word}]" for word in words]
    shown += [f"[{words[-1]} ...]"] if parser.takes_several else []
    shown += [] if parser.rest is None else [f"[{parser.rest.upper()} ...]"]
    number = sum(map(len, parser.groups.values()))
    is_short = number > _MOST_FLAGS and not has_all
    groups = _short_groups(parser) if is_short else _whole_groups(parser)
    arguments = (*parser.positionals, *([] if parser.rest is None else [parser.rest]))
    groups = {"Arguments": [(name.upper(), parser.about(name)) for name in arguments], **groups}
    longest = max(len(name) for rows in groups.values() for name, _ in rows) if any(groups.values()) else 0
    column = longest + 4 if is_short else _COLUMN
    blocks = [
        " ".join([f"usage: drivetrain {parser.command} [flags]", *shown]),
        page.paragraph(parser.summary),
        *(
            f"{page.heading(title)}\n{page.rows(rows, column=column)}"
            for title, rows in groups.items()
            if rows
        ),
    ]
    if is_short:
        blocks.append(f"drivetrain {parser.command} --help-all describes all {number} flags.")
    return "\n\n".join(filter(None, blocks)) + "\n"


def _whole_groups(parser: "CommandParser") -> dict[str, list[tuple[str, str]]]:
    """Return every flag with its whole help, by the title of its section."""
    return {
        "Flags" if section == OWN else f"Section {section}": [
            (_whole_name(flag), flag.help) for flag in flags
        ]
        for section, flags in parser.groups.items()
    }


def _short_groups(parser: "CommandParser") -> dict[str, list[tuple[str, str]]]:
    """Return the command's own flags, and those with a brief, by topic."""
    found: dict[str, list[tuple[str, str]]] = {}
    for section, flags in parser.groups.items():
        for flag in flags:
            if flag.brief or section == OWN:
                title = "Flags" if section == OWN else flag.topic
                found.setdefault(title, []).append((_short_name(flag), flag.brief or flag.help))
    return found


def _whole_name(flag: Flag) -> str:
    if flag.is_switch:
        return f"--[no-]{flag.name[2:]}"
    if flag.choices is None or _names_all(flag.help.rpartition(" (default: ")[0], flag.choices):
        return f"{flag.name} {flag.metavar}"
    return f"{flag.name} {{{','.join(flag.choices)}}}"


def _short_name(flag: Flag) -> str:
    if flag.is_switch and flag.brief:  # in the form that changes something
        return f"--no-{flag.name[2:]}" if flag.is_on else flag.name
    if flag.is_switch:
        return _whole_name(flag)
    return f"{flag.name} {flag.metavar}"


def _names_all(text: str, choices: Sequence[str]) -> bool:
    """Return whether a text names every choice; "unset" stands for none."""
    words: Iterable[str] = re.findall(r"[\w.-]*\w", text)
    return {*choices} <= {*words, *(["none"] if "unset" in words else [])}
