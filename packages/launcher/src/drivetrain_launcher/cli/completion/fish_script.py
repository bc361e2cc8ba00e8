"""Write the script that completes `drivetrain` in fish."""

from collections.abc import Sequence

from drivetrain_launcher.cli.completion.command_words import CommandWords, FlagWords
from drivetrain_launcher.cli.completion.shell_words import about, first_words, harmless_choices

_FUNCTIONS = r"""
# Tell whether the command line has reached the flags of a command, given by its words.
function __drivetrain_at
    set -l tokens (commandline -opc)
    set -l count (count $argv)
    test (count $tokens) -gt $count; or return 1
    set -l last (math $count + 1)
    test "$tokens[2..$last]" = "$argv"
end

# Tell the same, before the script of the command, whose own arguments follow it.
function __drivetrain_before_script
    __drivetrain_at $argv; or return 1
    set -l tokens (commandline -opc)
    set -l index (math (count $argv) + 2)
    while test $index -le (count $tokens)
        string match -q -- '-*' $tokens[$index]; or return 1
        contains -- $tokens[$index] $__drivetrain_takes; and set index (math $index + 1)
        set index (math $index + 1)
    end
    return 0
end

# Tell whether the first words are these alone.
function __drivetrain_after
    set -l tokens (commandline -opc)
    test (count $tokens) -eq (math (count $argv) + 1); or return 1
    test "$tokens[2..]" = "$argv"
end
"""


def fish_script(commands: Sequence[CommandWords], shared: Sequence[FlagWords]) -> str:
    """Return the script, which starts no process of drivetrain when it completes.

    Args:
        commands: The words of each command.
        shared: The flags of all sections.
    """
    taking = [
        flag.name
        for flags in (shared, *(each.flags for each in commands))
        for flag in flags
        if flag.takes_value
    ]
    lines = [
        "# Completes drivetrain in fish. Written by: drivetrain completion fish",
        "# Write it again after a package with commands, settings or plug-ins was installed.",
        f"set -g __drivetrain_takes {' '.join(map(_quoted, dict.fromkeys(taking)))}",
        _FUNCTIONS,
        *_next(commands),
    ]
    for command in commands:
        at = "__drivetrain_before_script" if command.takes_rest else "__drivetrain_at"
        condition = _quoted(f"{at} {command.name}")
        if not command.has_positionals:
            lines.append(f"complete -c drivetrain -n {_quoted(f'__drivetrain_at {command.name}')} -f")
        flags = (*command.flags, *(shared if command.has_sections else ()))
        own = {flag.name: flag for flag in reversed(flags)}  # a command's own flag hides a section's
        lines += [_flag(condition, flag) for flag in own.values()]
    return "\n".join([*lines, ""])


def _quoted(text: str) -> str:
    """Return a word that fish reads as it is."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def _next(commands: Sequence[CommandWords]) -> list[str]:
    """Return the lines for the first and the second words."""
    first, groups = first_words(commands)
    abouts = {command.name: command.about for command in commands}
    lines = ["complete -c drivetrain -n __drivetrain_after -f"]
    for name in first:
        text = _quoted(about(abouts.get(name, f"Commands of {name}.")))
        lines.append(f"complete -c drivetrain -n __drivetrain_after -a {_quoted(name)} -d {text}")
    for group, names in groups.items():
        condition = _quoted(f"__drivetrain_after {group}")
        lines.append(f"complete -c drivetrain -n {condition} -f")
        for name in names:
            text = _quoted(about(abouts[f"{group} {name}"]))
            lines.append(f"complete -c drivetrain -n {condition} -a {_quoted(name)} -d {text}")
    return lines


def _flag(condition: str, flag: FlagWords) -> str:
    line = (
        f"complete -c drivetrain -n {condition} -l {_quoted(flag.name[2:])} -d {_quoted(about(flag.about))}"
    )
    if choices := harmless_choices(flag):  # fish expands the words of -a
        return f"{line} -x -a {_quoted(' '.join(choices))}"
    if flag.is_path:
        return f"{line} -r -F"
    return f"{line} -x" if flag.takes_value else line
