"""Write the script that completes `drivetrain` in bash."""

from collections.abc import Sequence
from shlex import quote

from drivetrain_launcher.cli.completion.command_words import CommandWords, FlagWords
from drivetrain_launcher.cli.completion.shell_words import first_words, value_cases

_BODY = r"""
_drivetrain() {
    local cur=${COMP_WORDS[COMP_CWORD]} flag='' command='' words='' values='' takes='' rest='' files=''
    local first=${COMP_WORDS[1]} second=${COMP_WORDS[2]} start=2 index word
    COMPREPLY=()
    if ((COMP_CWORD > 1)); then
        if ((COMP_CWORD > 2)) && _drivetrain_command "$first $second"; then
            command="$first $second" start=3
        elif _drivetrain_command "$first"; then
            command=$first
        fi
    fi
    # bash divides --flag=value into three words.
    if [[ $cur == = ]]; then
        flag=${COMP_WORDS[COMP_CWORD - 1]} cur=''
    elif [[ ${COMP_WORDS[COMP_CWORD - 1]} == = ]]; then
        flag=${COMP_WORDS[COMP_CWORD - 2]}
    else
        flag=${COMP_WORDS[COMP_CWORD - 1]}
    fi
    if [[ -n $rest ]]; then
        for ((index = start; index < COMP_CWORD; index++)); do
            word=${COMP_WORDS[index]}
            if [[ $word == -* || $word == = ]]; then
                if [[ $word == = || ( $takes == *" $word "* && ${COMP_WORDS[index + 1]} != = ) ]]; then
                    ((index++))
                fi
            else
                compopt -o default  # the script has its own arguments
                return
            fi
        done
    fi
    _drivetrain_value "$command" "$flag"
    if [[ -n $values ]]; then
        mapfile -t COMPREPLY < <(compgen -W "$values" -- "$cur")
    elif [[ -n $files ]]; then
        compopt -o default
    elif [[ -n $flag && $takes == *" $flag "* ]]; then
        return
    elif [[ $cur == -* || ( -n $command && -z $positional ) ]]; then
        mapfile -t COMPREPLY < <(compgen -W "$words" -- "$cur")
    elif [[ -n $command ]]; then
        compopt -o default
    fi
    if ((COMP_CWORD == start || COMP_CWORD == 1)) && [[ $cur != -* ]]; then
        _drivetrain_next "$first"
        mapfile -t -O ${#COMPREPLY[@]} COMPREPLY < <(compgen -W "$words" -- "$cur")
    fi
}
complete -F _drivetrain drivetrain
"""


def bash_script(commands: Sequence[CommandWords], shared: Sequence[FlagWords]) -> str:
    """Return the script, which starts no process of drivetrain when it completes.

    Args:
        commands: The words of each command.
        shared: The flags of all sections.
    """
    return "\n".join(
        [
            "# Completes drivetrain in bash. Written by: drivetrain completion bash",
            "# Write it again after a package with commands, settings or plug-ins was installed.",
            f"_drivetrain_shared={quote(_names(shared))}",
            f"_drivetrain_shared_takes={quote(_taking(shared))}",
            *_commands(commands),
            *_next(commands),
            *_values(commands, shared),
            _BODY,
        ]
    )


def _names(flags: Sequence[FlagWords]) -> str:
    return " ".join(flag.name for flag in flags)


def _taking(flags: Sequence[FlagWords]) -> str:
    return " " + " ".join(flag.name for flag in flags if flag.takes_value) + " "


def _commands(commands: Sequence[CommandWords]) -> list[str]:
    """Return a function that looks a command up, and sets its words."""
    lines = ["_drivetrain_command() {", '    positional=""', '    case "$1" in']
    for command in commands:
        words, takes = quote(_names(command.flags)), quote(_taking(command.flags))
        if command.has_sections:
            words, takes = f'{words}" $_drivetrain_shared"', f'{takes}"$_drivetrain_shared_takes"'
        rest = "1" if command.takes_rest else "''"
        positional = "1" if command.has_positionals else "''"
        lines.append(
            f"        {quote(command.name)}) words={words} takes={takes} rest={rest} positional={positional} ;;"
        )
    return [*lines, "        *) return 1 ;;", "    esac", "}"]


def _next(commands: Sequence[CommandWords]) -> list[str]:
    """Return a function that sets the words that may follow the first one."""
    first, groups = first_words(commands)
    lines = ["_drivetrain_next() {", "    words=''", "    if ((COMP_CWORD == 1)); then"]
    lines += [f"        words={quote(' '.join(first))}", "        return", "    fi", '    case "$1" in']
    lines += [f"        {quote(group)}) words={quote(' '.join(names))} ;;" for group, names in groups.items()]
    return [*lines, "    esac", "}"]


def _values(commands: Sequence[CommandWords], shared: Sequence[FlagWords]) -> list[str]:
    """Return a function that sets the values of a flag, or that a file follows it."""
    lines = ["_drivetrain_value() {", '    case "$1 $2" in']
    for pattern, flag in value_cases(commands, shared):
        effect = "files=1" if flag.is_path else f"values={quote(' '.join(flag.choices))}"
        lines.append(
            f"        {'*' if pattern is None else ''}{quote(f'{pattern or str()} {flag.name}')}) {effect} ;;"
        )
    return [*lines, "        *) ;;", "    esac", "}"]
