"""Write the script that completes `drivetrain` in zsh."""

from collections.abc import Sequence
from shlex import quote

from drivetrain_launcher.cli.completion.command_words import CommandWords, FlagWords
from drivetrain_launcher.cli.completion.shell_words import about, first_words, value_cases

_BODY = r"""
_drivetrain() {
    local flag='' command='' rest='' positional='' shared='' files='' word
    local -a flags values takes
    local first=${words[2]-} second=${words[3]-}
    local -i start=3 index
    if ((CURRENT > 3)) && _drivetrain_command "$first $second"; then
        command="$first $second"
        start=4
    elif ((CURRENT > 2)) && _drivetrain_command "$first"; then
        command=$first
    fi
    if [[ -n $shared ]]; then
        flags+=("${_drivetrain_shared[@]}")
        takes+=("${_drivetrain_shared_takes[@]}")
    fi
    if [[ -n $rest ]]; then
        for ((index = start; index < CURRENT; index++)); do
            word=${words[index]}
            if [[ $word == -* ]]; then
                [[ $word != *=* && -n ${takes[(r)$word]} ]] && ((index++))
            else
                _files  # the script has its own arguments
                return
            fi
        done
    fi
    if [[ ${words[CURRENT]} == --*=* ]]; then
        flag=${words[CURRENT]%%=*}
        compset -P '*='
    else
        flag=${words[CURRENT - 1]}
    fi
    _drivetrain_value "$command" "$flag"
    if ((${#values})); then
        compadd -a values
        return
    elif [[ -n $files ]]; then
        _files
        return
    elif [[ -n ${takes[(r)$flag]} ]]; then
        return
    fi
    if [[ $PREFIX != -* ]] && ((CURRENT == 2 || CURRENT == start)); then
        local -a following
        _drivetrain_next "$first"
        ((${#following})) && _describe -t commands command following
    fi
    if [[ $PREFIX == -* || ( -n $command && -z $positional ) ]]; then
        ((${#flags})) && _describe -t flags flag flags
    elif [[ -n $command ]]; then
        _files
    fi
}
if [[ ${funcstack[1]-} == _drivetrain ]]; then
    _drivetrain "$@"  # loaded by compinit, at the first completion
else
    compdef _drivetrain drivetrain
fi
"""


def zsh_script(commands: Sequence[CommandWords], shared: Sequence[FlagWords]) -> str:
    """Return the script, which starts no process of drivetrain when it completes.

    Args:
        commands: The words of each command.
        shared: The flags of all sections.
    """
    return "\n".join(
        [
            "#compdef drivetrain",
            "# Completes drivetrain in zsh. Written by: drivetrain completion zsh",
            "# Write it again after a package with commands, settings or plug-ins was installed.",
            f"typeset -ga _drivetrain_shared=({_described(shared)})",
            f"typeset -ga _drivetrain_shared_takes=({_taking(shared)})",
            *_commands(commands),
            *_next(commands),
            *_values(commands, shared),
            _BODY,
        ]
    )


def _entry(name: str, text: str) -> str:
    """Return a word with its description, as _describe takes it."""
    escaped = name.replace(":", "\\:")
    return quote(f"{escaped}:{about(text)}")


def _described(flags: Sequence[FlagWords]) -> str:
    return " ".join(_entry(flag.name, flag.about) for flag in flags)


def _taking(flags: Sequence[FlagWords]) -> str:
    return " ".join(quote(flag.name) for flag in flags if flag.takes_value)


def _commands(commands: Sequence[CommandWords]) -> list[str]:
    """Return a function that looks a command up, and sets its words."""
    lines = ["_drivetrain_command() {", '    case "$1" in']
    for command in commands:
        lines += [
            f"        {quote(command.name)})",
            f"            flags=({_described(command.flags)})",
            f"            takes=({_taking(command.flags)})",
            f"            shared={'1' if command.has_sections else ''} rest={'1' if command.takes_rest else ''}"
            f" positional={'1' if command.has_positionals else ''}",
            "            ;;",
        ]
    return [*lines, "        *) return 1 ;;", "    esac", "}"]


def _next(commands: Sequence[CommandWords]) -> list[str]:
    """Return a function that sets the words that may follow the first one."""
    first, groups = first_words(commands)
    abouts = {command.name: command.about for command in commands}
    entries = " ".join(_entry(name, abouts.get(name, f"Commands of {name}.")) for name in first)
    lines = ["_drivetrain_next() {", "    if ((CURRENT == 2)); then", f"        following=({entries})"]
    lines += ["        return", "    fi", "    following=()", '    case "$1" in']
    for group, names in groups.items():
        entries = " ".join(_entry(name, abouts[f"{group} {name}"]) for name in names)
        lines.append(f"        {quote(group)}) following=({entries}) ;;")
    return [*lines, "    esac", "}"]


def _values(commands: Sequence[CommandWords], shared: Sequence[FlagWords]) -> list[str]:
    """Return a function that sets the values of a flag, or that a file follows it."""
    lines = ["_drivetrain_value() {", '    case "$1 $2" in']
    for pattern, flag in value_cases(commands, shared):
        effect = "files=1" if flag.is_path else f"values=({' '.join(map(quote, flag.choices))})"
        lines.append(
            f"        {'*' if pattern is None else ''}{quote(f'{pattern or str()} {flag.name}')}) {effect} ;;"
        )
    return [*lines, "        *) ;;", "    esac", "}"]
