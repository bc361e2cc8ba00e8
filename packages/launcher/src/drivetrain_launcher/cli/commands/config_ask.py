"""Ask what matters here, and write a settings file."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote
from shutil import get_terminal_size
from textwrap import wrap
from typing import Any

from drivetrain_config import Layers, sections
from drivetrain_config.files.settings_file import read_file
from drivetrain_config.settings.plugin_names import check_plugins
from drivetrain_config.settings.schema import specs
from drivetrain_config.settings.vocabulary import converted
from drivetrain_launcher.errors import LaunchError
from drivetrain_launcher.wizard.interview import ask_all, choose_asker
from drivetrain_launcher.wizard.machine_facts import describe_machine, detect_machine
from drivetrain_launcher.wizard.questionnaire import Choice, GivenAnswer, Key
from drivetrain_launcher.wizard.settings_text import (
    answers_of,
    backup_of,
    launch_line,
    settings_text,
    write_settings,
)
from drivetrain_messages import argument, say

_FILE = Path("drivetrain.yaml")
_INTERRUPTED = 130  # the exit code of a shell for Ctrl-C


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigArguments:
    """The arguments of `drivetrain config`."""

    output: Path = argument(_FILE, "YAML file to write; launches find the default by themselves.")
    yes: bool = argument(False, "Take every recommended answer; ask nothing.")
    from_: Path | None = argument(None, "Settings file to convert; Accelerate's YAML too; asks nothing.")
    force: bool = argument(False, "Replace a file that is there without asking; a copy is kept.")
    layers: Layers = field(default_factory=lambda: Layers({}))

    def __post_init__(self) -> None:
        if self.output.suffix not in (".yaml", ".yml"):
            raise ValueError(f"output={str(self.output)!r}: the file is YAML; say a name that ends in .yaml")


def run(arguments: ConfigArguments) -> int:
    """Ask what matters for a run on this machine, and write a settings file; flags answer questions beforehand."""
    return ask_for_launch(arguments, command="drivetrain launch")


def ask_for_launch(arguments: ConfigArguments, *, command: str) -> int:
    """Ask and write a settings file, then show how a command, such as "drivetrain launch", uses the file."""
    try:
        return _run(arguments, command)
    except KeyboardInterrupt:
        sys.stdout.write("\n")
        say("interrupted; nothing was written")
        return _INTERRUPTED


def _run(arguments: ConfigArguments, command: str) -> int:
    asker = None if arguments.yes or arguments.from_ is not None else choose_asker()
    path = arguments.output
    if path.exists() and not arguments.force:
        if asker is None:
            raise LaunchError(
                f"{path} is there: say --force to replace it (a copy is kept as {backup_of(path)}), or --output FILE"
            )
        replace = Choice(value=True, label="replace it", about=f"a copy is kept as {backup_of(path)}")
        keep = Choice(value=False, label="keep it", about="and ask nothing")
        why = "its settings become the recommended answers"
        if not asker.choose(f"{path} is there. Replace it?", why, (replace, keep)).value:
            say(f"{path} is left as it is")
            return 0
    kinds = sections()
    given = _read_given(arguments.layers, kinds)
    if arguments.from_ is not None:
        answers = {**_settings_of(arguments.from_, "as in"), **given}
        heading = f"The settings of a drivetrain run, converted from {arguments.from_}."
    else:
        known = detect_machine()
        machine = describe_machine(known)
        sys.stdout.write(f"{machine}\n")
        before = path if path.is_file() else None
        if arguments.layers.file is not None:
            before = arguments.layers.file.path
        earlier = {} if before is None else _settings_of(before, "as before, in")
        answers = ask_all(asker, kinds, known, given, earlier)
        heading = f"The settings of a drivetrain run, chosen by drivetrain config on {machine}."
    kept = write_settings(path, settings_text(answers, kinds, heading=[heading]))
    _report(path, kept, answers, launch_line(answers, kinds, command=command), command=command)
    return 0


def _read_given(layers: Layers, kinds: dict[str, type[Any]]) -> dict[Key, GivenAnswer]:
    """Return the settings that flags give, and report environment variables that override the file."""
    found: dict[Key, GivenAnswer] = {}
    for (section, name), entries in layers.entries.items():
        spec = next(each for each in specs(kinds[section], section) if each.name == name)
        for entry in entries:
            if entry.source.kind == "command line":
                value = converted(section, name, spec.kind, entry)
                for note in check_plugins(spec, value, entry.source):
                    say(note)
                found[section, name] = GivenAnswer(value=value, why=f"given by {entry.source.where}")
            elif entry.source.kind == "environment":
                say(
                    f"{entry.source.where} in the environment wins over {section}.{name} of the file while it is set"
                )
    return found


def _settings_of(path: Path, why: str) -> dict[Key, GivenAnswer]:
    """Return the settings of a file, and report each setting that drivetrain realises differently."""
    contents = read_file(path)
    for line in contents.notices:
        say(line)
    return answers_of(contents, why)


def _report(
    path: Path, kept: Path | None, answers: Mapping[Key, GivenAnswer], line: str, *, command: str
) -> None:
    num_nodes, rendezvous = (answers.get(("launch", name)) for name in ("num_nodes", "rdzv_backend"))
    needs_node_rank = (
        num_nodes is not None
        and num_nodes.value > 1
        and (rendezvous is None or rendezvous.value == "static")
        and ("launch", "node_rank") not in answers
    )
    words = [command]
    words += [] if path == _FILE else [f"--config {quote(str(path))}"]
    words += ["--node-rank N"] if needs_node_rank else []
    shown = wrap(
        line,
        get_terminal_size().columns - 4,
        initial_indent="  ",
        subsequent_indent="      ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    same_line = " \\\n".join(shown)
    copy = "" if kept is None else f"; the one that was there is {kept}"
    each = " on each machine, with its own N from 0," if needs_node_rank else ""
    sys.stdout.write(
        f"\nWrote {path}{copy}.\n\n  {' '.join([*words, 'train.py'])}\n\nis{each} now the same as\n\n{same_line}\n"
    )
