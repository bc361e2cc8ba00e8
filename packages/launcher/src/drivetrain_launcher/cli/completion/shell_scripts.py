"""Write the scripts that complete `drivetrain` in bash, zsh and fish. Completion starts no process.

bash and zsh read the same tables: shell functions that set arrays of "word:description". fish knows no tables, and
gets a line for each flag.
"""

import re
from collections.abc import Iterable, Sequence
from shlex import quote

from drivetrain_launcher.cli.completion.command_words import CommandWords, FlagWords

# What a choice may hold: bash expands the words that it completes, so that others would run as commands.
_HARMLESS = re.compile(r"[\w.:/+@%,-]+")

_BASH = r"""
_drivetrain() {
    local cur=${COMP_WORDS[COMP_CWORD]} flag=${COMP_WORDS[COMP_CWORD - 1]} command='' start=2 index word
    local first=${COMP_WORDS[1]} second=${COMP_WORDS[2]} rest='' positional='' files=''
    local -a flags=() values=() takes=() following=()
    COMPREPLY=()
    if ((COMP_CWORD > 2)) && _drivetrain_command "$first $second"; then
        command="$first $second" start=3
    elif ((COMP_CWORD > 1)) && _drivetrain_command "$first"; then
        command=$first
    fi
    if [[ -n $rest ]]; then
        for ((index = start; index < COMP_CWORD; index++)); do
            word=${COMP_WORDS[index]}
            if [[ $word == -* || $word == = ]]; then
                if [[ $word == = || ( " ${takes[*]} " == *" $word "* && ${COMP_WORDS[index + 1]} != = ) ]]; then
                    ((index++))
                fi
            else
                compopt -o default  # the script has its own arguments
                return
            fi
        done
    fi
    # bash divides --flag=value into three words.
    if [[ $cur == = ]]; then
        cur=''
    elif [[ $flag == = ]]; then
        flag=${COMP_WORDS[COMP_CWORD - 2]}
    fi
    _drivetrain_value "$command" "$flag"
    if ((${#values[@]})); then
        mapfile -t COMPREPLY < <(compgen -W "${values[*]}" -- "$cur")
    elif [[ -n $files ]]; then
        compopt -o default
    elif [[ -n $flag && " ${takes[*]} " == *" $flag "* ]]; then
        return
    elif [[ $cur == -* || ( -n $command && -z $positional ) ]]; then
        mapfile -t COMPREPLY < <(compgen -W "${flags[*]%%:*}" -- "$cur")
    elif [[ -n $command ]]; then
        compopt -o default
    fi
    if ((COMP_CWORD == start || COMP_CWORD == 1)) && [[ $cur != -* ]]; then
        ((COMP_CWORD == 1)) && first=''
        _drivetrain_next "$first"
        mapfile -t -O ${#COMPREPLY[@]} COMPREPLY < <(compgen -W "${following[*]%%:*}" -- "$cur")
    fi
}
complete -F _drivetrain drivetrain
"""

_ZSH = r"""
_drivetrain() {
    local flag='' command='' rest='' positional='' files='' word
    local -a flags values takes following
    local first=${words[2]-} second=${words[3]-}
    local -i start=3 index
    if ((CURRENT > 3)) && _drivetrain_command "$first $second"; then
        command="$first $second" start=4
    elif ((CURRENT > 2)) && _drivetrain_command "$first"; then
        command=$first
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
        ((CURRENT == 2)) && first=''
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

_FISH = r"""
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

SHELLS = ("bash", "zsh", "fish")


def shell_script(shell: str, commands: Sequence[CommandWords], shared: Sequence[FlagWords]) -> str:
    """Return the script of one of `SHELLS`; `shared` are the flags of all sections."""
    about = [
        *(["#compdef drivetrain"] if shell == "zsh" else []),
        f"# Completes drivetrain in {shell}. Written by: drivetrain completion {shell}",
        "# Write it again after a package with commands, settings or plug-ins was installed.",
    ]
    if shell == "fish":
        lines = _fish_lines(commands, shared)
    else:
        lines = [*_tables(commands, shared), _BASH if shell == "bash" else _ZSH]
    return "\n".join([*about, *lines])


def _tables(commands: Sequence[CommandWords], shared: Sequence[FlagWords]) -> list[str]:
    """Return shell functions that set the caller's arrays of flags (bash, zsh)."""
    lines = [
        f"typeset -ga _drivetrain_shared=({_describe_words((flag.name, flag.about) for flag in shared)})",
        f"typeset -ga _drivetrain_shared_takes=({_join_takers(shared)})",
        '_drivetrain_command() {\n    case "$1" in',
    ]
    for command in commands:
        flags = _describe_words((flag.name, flag.about) for flag in command.flags)
        takers = _join_takers(command.flags)
        if command.has_sections:
            flags += ' "${_drivetrain_shared[@]}"'
            takers += ' "${_drivetrain_shared_takes[@]}"'
        lines += [
            f"    {quote(command.name)})",
            f"        flags=({flags})",
            f"        takes=({takers})",
            f"        rest={'1' * command.takes_rest} positional={'1' * command.has_positionals} ;;",
        ]
    lines += ["    *) return 1 ;;\n    esac\n}", '_drivetrain_next() {\n    case "$1" in']
    for first, following in _find_next_words(commands).items():
        lines.append(f"    {quote(first)}) following=({_describe_words(following)}) ;;")
    lines += ["    esac\n}", '_drivetrain_value() {\n    case "$1 $2" in']
    of_commands = [
        (quote(f"{command.name} {flag.name}"), flag) for command in commands for flag in command.flags
    ]
    for pattern, flag in [*of_commands, *((f"*{quote(f' {flag.name}')}", flag) for flag in shared)]:
        if flag.is_path:
            lines.append(f"    {pattern}) files=1 ;;")
        elif choices := _harmless_choices(flag):
            lines.append(f"    {pattern}) values=({' '.join(choices)}) ;;")
    return [*lines, "    esac\n}"]


def _describe_words(words: Iterable[tuple[str, str]]) -> str:
    return " ".join(quote(f"{word}:{_shorten(about)}") for word, about in words)


def _join_takers(flags: Iterable[FlagWords]) -> str:
    """Return the flags that take a value."""
    return " ".join(quote(flag.name) for flag in flags if flag.takes_value)


def _find_next_words(commands: Sequence[CommandWords]) -> dict[str, list[tuple[str, str]]]:
    """Return the words, with descriptions, that may follow each first word; the key "" has the first words."""
    found: dict[str, dict[str, str]] = {"": {}}
    for command in commands:
        group, space, member = command.name.partition(" ")
        if space:
            found.setdefault(group, {})[member] = command.about
            found[""].setdefault(group, f"Commands of {group}.")
        else:
            found[""][command.name] = command.about
    return {first: list(following.items()) for first, following in found.items()}


def _fish_lines(commands: Sequence[CommandWords], shared: Sequence[FlagWords]) -> list[str]:
    every = [*shared, *(flag for command in commands for flag in command.flags)]
    taking = dict.fromkeys(_fish_word(flag.name) for flag in every if flag.takes_value)
    lines = [f"set -g __drivetrain_takes {' '.join(taking)}", _FISH]
    for first, following in _find_next_words(commands).items():
        complete = f"complete -c drivetrain -n {_fish_word(f'__drivetrain_after {first}'.rstrip())}"
        lines.append(f"{complete} -f")
        lines += [
            f"{complete} -a {_fish_word(word)} -d {_fish_word(_shorten(about))}" for word, about in following
        ]
    for command in commands:
        if not command.has_positionals:
            lines.append(f"complete -c drivetrain -n {_fish_word(f'__drivetrain_at {command.name}')} -f")
        at = "__drivetrain_before_script" if command.takes_rest else "__drivetrain_at"
        flags = (*command.flags, *(shared if command.has_sections else ()))
        # A command's own flag hides a section's.
        for flag in {flag.name: flag for flag in reversed(flags)}.values():
            line = f"complete -c drivetrain -n {_fish_word(f'{at} {command.name}')} -l {_fish_word(flag.name[2:])}"
            line += f" -d {_fish_word(_shorten(flag.about))}"
            if choices := _harmless_choices(flag):
                line += f" -x -a {_fish_word(' '.join(choices))}"  # fish expands them too
            elif flag.is_path:
                line += " -r -F"
            elif flag.takes_value:
                line += " -x"
            lines.append(line)
    return [*lines, ""]


def _fish_word(text: str) -> str:
    """Quote a text so that fish reads it as one unchanged word."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def _harmless_choices(flag: FlagWords) -> tuple[str, ...]:
    """Return the values of a flag that every shell reads as plain words."""
    return tuple(choice for choice in flag.choices if _HARMLESS.fullmatch(choice))


def _shorten(about: str) -> str:
    """Return a description in one line, shortened to the width of a menu."""
    line = " ".join(about.split())
    return line if len(line) <= 80 else f"{line[:77].rstrip()}..."
