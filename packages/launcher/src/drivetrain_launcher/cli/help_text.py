"""Draw the help of a command: all of its flags, or, of many, those that people use, a line each."""

import re
from collections.abc import Mapping, Sequence

from drivetrain_config import Flag
from drivetrain_launcher.cli.help_page import Page

# The key of the command's own flags, among the names of sections.
OWN = ""
# A command with more flags has a short help.
_MOST_FLAGS = 20
_COLUMN = 24

_Rows = list[tuple[str, str]]


def help_text(
    page: Page,
    *,
    command: str,
    usage: Sequence[str],
    summary: str,
    arguments: Sequence[tuple[str, str]],
    groups: Mapping[str, Sequence[Flag]],
    has_all: bool,
) -> str:
    """Return the text of `--help`, or with `has_all` of `--help-all`.

    If a command has more than 20 flags, `--help` shows the command's own, and those of sections whose fields have a
    `brief` in their metadata. `usage` are the words that follow the flags; `groups` has the flags by section, and the
    command's own under an empty name.
    """
    number = sum(map(len, groups.values()))
    is_short = number > _MOST_FLAGS and not has_all
    shown = {"Arguments": [*arguments], **(_short(groups) if is_short else _whole(groups))}
    column = 4 + max(len(name) for rows in shown.values() for name, _ in rows) if is_short else _COLUMN
    blocks = [
        " ".join([f"usage: drivetrain {command} [flags]", *usage]),
        page.paragraph(summary),
        *(
            f"{page.heading(title)}\n{page.rows(rows, column=column)}"
            for title, rows in shown.items()
            if rows
        ),
    ]
    if is_short:
        blocks.append(f"drivetrain {command} --help-all describes all {number} flags.")
    return "\n\n".join(filter(None, blocks)) + "\n"


def _whole(groups: Mapping[str, Sequence[Flag]]) -> dict[str, _Rows]:
    """Return every flag with its whole help, by the title of its section."""
    return {
        "Flags" if section == OWN else f"Section {section}": [
            (_whole_name(flag), flag.help) for flag in flags
        ]
        for section, flags in groups.items()
    }


def _short(groups: Mapping[str, Sequence[Flag]]) -> dict[str, _Rows]:
    """Return the command's own flags, and those with a brief, by topic."""
    found: dict[str, _Rows] = {}
    for section, flags in groups.items():
        for flag in flags:
            if flag.topic or section == OWN:
                title = "Flags" if section == OWN else flag.topic
                found.setdefault(title, []).append((_short_name(flag), flag.brief))
    return found


def _whole_name(flag: Flag) -> str:
    if flag.is_switch:
        return f"--[no-]{flag.name[2:]}"
    if flag.choices is None or _names_all(flag.help.rpartition(" (default: ")[0], flag.choices):
        return f"{flag.name} {flag.metavar}"
    return f"{flag.name} {{{','.join(flag.choices)}}}"


def _short_name(flag: Flag) -> str:
    if not flag.is_switch:
        return f"{flag.name} {flag.metavar}"
    if flag.is_on and not flag.topic:  # its text is about the switch that is on
        return _whole_name(flag)
    return f"--no-{flag.name[2:]}" if flag.is_on else flag.name  # the form that changes something


def _names_all(text: str, choices: Sequence[str]) -> bool:
    """Return whether a text names every choice; "unset" stands for none."""
    words = set(re.findall(r"[\w.-]*\w", text))
    return words.issuperset(choice for choice in choices if choice != "none" or "unset" not in words)
