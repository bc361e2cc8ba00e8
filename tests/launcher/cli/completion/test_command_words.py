from pathlib import Path
from typing import get_type_hints

import pytest

from drivetrain_config import commands
from drivetrain_launcher.cli.completion.command_words import (
    CommandWords,
    FlagWords,
    read_commands,
    section_flags,
)
from drivetrain_launcher.cli.parser import build_parser

# The packages whose commands need torch import it here: the test holds what is read from source to the parsers.
COMMANDS = {command.name: command for command in read_commands(commands())}


@pytest.mark.parametrize("name", sorted(commands()))
def test_what_is_read_from_source_is_what_the_parser_takes(name: str) -> None:
    run = commands()[name].load()
    arguments = next(hint for argument, hint in get_type_hints(run).items() if argument != "return")
    parser = build_parser(name, arguments, "")
    words = COMMANDS[name.replace(".", " ")]
    own = {flag.name: flag for flag in words.flags}
    # Every command that reads settings has --config; its own field of that name may say what to do with it.
    parsed = {
        flag: of
        for flag, of in parser.flags.items()
        if of.section == "" and (flag != "--config" or flag in own)
    }
    assert own.keys() == parsed.keys()
    for flag, of in parsed.items():
        assert own[flag].takes_value is not of.is_switch
        # A text that is computed is not read from source.
        assert of.help.replace("%%", "%").startswith(own[flag].about.removeprefix("Not: ").rstrip("."))
        assert of.choices is None or own[flag].choices == of.choices or of.is_switch
    assert words.has_sections is (parser.layers is not None)
    assert words.takes_rest is (parser.rest is not None)
    assert words.has_positionals is bool(parser.positionals)


def test_flags_are_described_as_in_the_help() -> None:
    words = {flag.name: flag.about for flag in COMMANDS["tail"].flags}
    assert words["--lines"] == "Number of last lines of each file."


def test_the_flags_of_sections_are_those_of_the_launch() -> None:
    run = commands()["launch"].load()
    parser = build_parser("launch", next(iter(get_type_hints(run).values())), "")
    of_sections = {name for name, flag in parser.flags.items() if flag.section} | {"--config"}
    assert {flag.name for flag in section_flags()} == of_sections
    if "--backend" in of_sections:  # the umbrella is installed
        assert parser.flags["--deepspeed-offload-optimizer"].choices == ("none", "cpu", "nvme")


def test_no_flag_lists_a_choice_twice() -> None:
    words = [*section_flags(), *(flag for command in COMMANDS.values() for flag in command.flags)]
    assert [flag for flag in words if len(set(flag.choices)) < len(flag.choices)] == []


def test_names_of_plugins_are_offered_where_a_flag_takes_them() -> None:
    clusters = ("kubernetes", "local", "mpi", "ray", "slurm")
    submit = {flag.name: flag.choices for flag in COMMANDS["submit"].flags}
    of_sections = {flag.name: flag.choices for flag in section_flags()}
    assert set(clusters) <= set(submit["--on"])
    assert of_sections["--cluster"] == ("auto", "none", *submit["--on"])
    if "--backend" in of_sections:  # the umbrella is installed
        assert {"auto", "ddp", "fsdp"} <= set(of_sections["--backend"])
        assert {"all", "jsonl", "wandb"} <= set(of_sections["--log-with"])
        assert "module:Class" not in of_sections["--log-with"]


@pytest.mark.slow
def test_a_third_partys_command_is_read_without_being_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {
        "cats-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: cats\nVersion: 1.0\n",
        "cats-1.0.dist-info/entry_points.txt": "[drivetrain.commands]\ncats.feed = cats.feed:run\n"
        "[cats.bowls]\nblue = cats.bowls:Blue\n",
        "cats/__init__.py": "",
        "cats/meals.py": "from dataclasses import dataclass, field\nfrom pathlib import Path\n"
        "from typing import ClassVar, Literal\n\n@dataclass\nclass Meal:\n    bowls: ClassVar[int] = 1\n"
        "    recipe: Path | None = field(default=None, metadata={'help': \"It's a 'recipe'.\"})\n"
        "    kind: Literal['fish', 'mice'] | None = None\n    warm: bool = True\n"
        "    dishes: tuple[Literal['soup', 'pie'], ...] = ()\n"
        "    at: str = field(metadata={'plugins': 'cats.bowls'})\n",
        "cats/feed.py": '"""Feed a cat."""\nfrom cats.meals import Meal\nraise RuntimeError("was run")\n\n'
        "def run(meal: Meal) -> int:\n    return 0\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    (found,) = (each for each in read_commands(commands()) if each.name == "cats feed")
    assert found == CommandWords(
        name="cats feed",
        about="Feed a cat.",
        flags=(
            FlagWords(name="--recipe", about="It's a 'recipe'.", is_path=True),
            FlagWords(name="--kind", choices=("fish", "mice", "none")),
            FlagWords(name="--warm", takes_value=False),
            FlagWords(name="--no-warm", about="Not: ", takes_value=False),
            FlagWords(name="--dishes", choices=("soup", "pie")),
            FlagWords(name="--at", choices=("blue",)),
        ),
    )
