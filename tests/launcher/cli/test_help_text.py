import re
from dataclasses import dataclass, field

import pytest

from drivetrain_config import Layers, commands, sections
from drivetrain_launcher.cli.command_arguments import load_arguments
from drivetrain_launcher.cli.commands.launch import LaunchArguments
from drivetrain_launcher.cli.help_page import Page
from drivetrain_launcher.cli.parser import build_parser
from drivetrain_messages import argument

LAUNCH = build_parser("launch", LaunchArguments, "Launch it.")
needs_umbrella = pytest.mark.skipif(not sections(only={"run"}), reason="the section run is not installed")


def names_in(text: str) -> set[str]:
    """The flags that begin a row."""
    return set(re.findall(r"^  (--\S+)", text, re.MULTILINE))


def test_the_short_help_has_the_flags_with_a_brief_a_line_each() -> None:
    shown = LAUNCH.help(Page())
    flags = [flag for group in LAUNCH.groups.values() for flag in group]
    assert names_in(shown) == {flag.name for flag in flags if flag.topic or flag.section == ""}
    assert f"--help-all describes all {len(flags)} flags" in shown


@pytest.mark.parametrize("name", sorted(commands()))
def test_each_flag_of_a_short_help_is_one_line_of_80_columns(name: str) -> None:
    parser = build_parser(name, *load_arguments(commands()[name]))
    shown = parser.help(Page())
    if "--help-all describes" in shown:
        for line in shown.partition("\nFlags\n")[2].splitlines():
            assert len(line) <= 80
            assert not line.startswith("    "), "a brief is longer than its line"


@needs_umbrella
def test_the_short_help_of_a_launch_is_about_twenty_flags_under_topics() -> None:
    shown = LAUNCH.help(Page())
    assert 20 <= len(names_in(shown)) <= 26
    assert re.findall("^[A-Z].*$", shown, re.MULTILINE)[1:] == [
        "Arguments", "Flags", "Processes", "Training", "Results"
    ]  # fmt: skip


def test_the_whole_help_has_every_flag_of_every_section() -> None:
    shown = names_in(LAUNCH.help(Page(), has_all=True))
    for group in LAUNCH.groups.values():
        assert {f"--[no-]{flag.name[2:]}" if flag.is_switch else flag.name for flag in group} <= shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Few:
    source: str = argument(..., "Where from.", positional=True)
    steps: int = argument(1, "How many, 100% of them.", brief="How many")


def test_a_command_of_few_flags_has_one_help_and_the_parser_prints_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    parser = build_parser("copy", Few, "Copy it.")
    for word in ("-h", "--help", "--help-all"):
        with pytest.raises(SystemExit, match="0"):
            parser.parse(["here", word])
        assert capsys.readouterr().out == (
            "usage: drivetrain copy [flags] SOURCE\n\nCopy it.\n\n"
            "Arguments\n  SOURCE                Where from.\n\n"
            "Flags\n  --steps N             How many, 100% of them (default: 1)\n"
        )


def test_the_parser_prints_the_short_help_or_the_whole(capsys: pytest.CaptureFixture[str]) -> None:
    sizes: dict[str, int] = {}
    for word in ("--help", "--help-all"):
        with pytest.raises(SystemExit, match="0"):
            LAUNCH.parse([word])
        sizes[word] = len(capsys.readouterr().out.splitlines())
    assert sizes["--help"] < 60 < sizes["--help-all"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Own:
    purpose: str = argument("", "What it is for, in a text that is longer than a brief could be.")
    quiet: bool = field(default=True, metadata={"help": "Whether to be quiet.", "brief": "Make noise"})
    layers: Layers = field(default_factory=lambda: Layers({}))


def test_the_short_help_has_a_commands_own_flags_and_a_switch_as_it_changes_something() -> None:
    shown = build_parser("probe", Own, "Probe it.").help(Page())
    assert {"--purpose", "--no-quiet", "--config"} <= names_in(shown)
    assert "--quiet" not in names_in(shown)
    assert "What it is for, in a text that is longer" in " ".join(shown.split())


@pytest.mark.parametrize("name", sorted(commands()))
def test_no_help_shows_the_choices_of_a_flag_twice(name: str) -> None:
    parser = build_parser(name, *load_arguments(commands()[name]))
    shown = parser.help(Page(width=100_000), has_all=True)
    for flag in (flag for group in parser.groups.values() for flag in group if flag.choices):
        (row,) = re.findall(rf"^  {flag.name} .*(?:\n {{24}}.*)?$", shown, re.MULTILINE)
        text = re.sub(r" \(default: [^()]*\)$", "", row)
        if "{" in row:
            words = set(re.findall(r"[\w.-]*\w", text.partition("}")[2]))
            assert not set(flag.choices or ()) <= words, row
