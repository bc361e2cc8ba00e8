"""The words of commands as the scripts of all shells need them."""

from collections.abc import Iterator, Sequence

from drivetrain_launcher.cli.completion.command_words import CommandWords, FlagWords


def first_words(commands: Sequence[CommandWords]) -> tuple[list[str], dict[str, list[str]]]:
    """Return the valid first words, and the second words of each group."""
    first = list(dict.fromkeys(command.name.partition(" ")[0] for command in commands))
    groups: dict[str, list[str]] = {}
    for command in commands:
        group, space, name = command.name.partition(" ")
        if space:
            groups.setdefault(group, []).append(name)
    return first, groups


def value_cases(
    commands: Sequence[CommandWords], shared: Sequence[FlagWords]
) -> Iterator[tuple[str | None, FlagWords]]:
    """Yield each flag whose value can be completed, with its command; None for a flag of all commands."""
    for command in commands:
        yield from ((command.name, flag) for flag in command.flags if flag.choices or flag.is_path)
    yield from ((None, flag) for flag in shared if flag.choices or flag.is_path)


def about(text: str) -> str:
    """Return a description in one line, cut where a menu would wrap it."""
    line = " ".join(text.split())
    return line if len(line) <= 80 else f"{line[:77].rstrip()}..."
