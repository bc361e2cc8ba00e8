from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain_config import Layers, resolve
from drivetrain_launcher import LaunchSettings
from drivetrain_launcher.cli.commands.launch import LaunchArguments
from drivetrain_launcher.cli.help_page import Page
from drivetrain_launcher.cli.parser import build_parser
from drivetrain_launcher.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    source: Path = field(metadata={"positional": True, "help": "Where from."})
    steps: int = field(default=1, metadata={"help": "How many, 100% of them."})
    dry_run: bool = field(default=True, metadata={"help": "Do nothing."})


def parse(*tokens: str) -> Arguments:
    return build_parser("copy", Arguments, "Copy it.").parse(tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class ManyArguments:
    target: str = field(metadata={"positional": True, "help": "Where to."})
    sources: tuple[str, ...] = field(metadata={"positional": True, "help": "Where from."})
    steps: int = field(default=1, metadata={"help": "How many."})


def launch(*tokens: str) -> LaunchArguments:
    return build_parser("launch", LaunchArguments, "Run it.").parse(tokens)


def settings(arguments: LaunchArguments) -> LaunchSettings:
    return resolve(LaunchSettings, section="launch", layers=arguments.layers).value


def test_fields_become_flags_and_positional_arguments() -> None:
    assert parse("here", "--steps", "3") == Arguments(source=Path("here"), steps=3)
    assert parse("--steps=3", "here", "--no-dry-run") == Arguments(
        source=Path("here"), steps=3, dry_run=False
    )
    assert parse("--no_dry_run", "--", "--here") == Arguments(source=Path("--here"), dry_run=False)


def test_the_last_positional_argument_takes_several_words_if_it_is_a_tuple(
    capsys: pytest.CaptureFixture[str],
) -> None:
    parser = build_parser("copy", ManyArguments, "Copy them.")
    assert parser.parse(["to", "a,b", "--steps", "2", "c"]) == ManyArguments(
        target="to", sources=("a,b", "c"), steps=2
    )
    with pytest.raises(UsageError, match=r"SOURCES is missing: Where from\."):
        parser.parse(["to"])
    with pytest.raises(SystemExit, match="0"):
        parser.parse(["--help"])
    assert "drivetrain copy [flags] TARGET SOURCES [SOURCES ...]" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ((), "SOURCE is missing: Where from."),
        (("a", "b"), "'b': not expected here"),
        (("a", "--stepz", "3"), r"--stepz: no such flag; did you mean --steps"),
        (("a", "--steps"), "--steps: needs a value"),
        (("a", "--steps", "--dry-run"), "--steps: needs a value"),
        (("a", "--steps", "three"), "--steps three: must be an integer"),
        (("a", "--dry-run=maybe"), "--dry-run=maybe: --dry-run takes no value"),
    ],
)
def test_a_wrong_command_line_says_what_is_wrong(tokens: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse(*tokens)


def test_help_lists_every_flag_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        parse("--help")
    shown = capsys.readouterr().out
    assert "usage: drivetrain copy [flags] SOURCE" in shown
    assert "--steps N" in shown
    assert "100% of them" in shown
    assert "(default: 1)" in shown


@given(rest=st.lists(st.text(max_size=8)))
def test_the_scripts_own_arguments_are_not_touched(rest: list[str]) -> None:
    arguments = launch("--num-processes", "2", "train.py", *rest)
    assert arguments.script == "train.py"
    assert arguments.arguments == tuple(rest)


def test_flags_behind_the_script_are_the_scripts() -> None:
    arguments = launch("train.py", "--num-processes", "8", "--help", "--", "-m")
    assert arguments.arguments == ("--num-processes", "8", "--help", "--", "-m")
    assert arguments.layers.entries.keys() == Layers.read().entries.keys()


@pytest.mark.parametrize(
    ("tokens", "setting", "value"),
    [
        (("--multi_gpu",), ("state", "device"), "cuda"),
        (("--gpu_ids", "all"), ("launch", "devices"), ""),
        (("--num_machines=2",), ("launch", "num_nodes"), "2"),
        (("--nnodes", "1:4"), ("launch", "min_nodes"), "1"),
        (("--num-nodes", "1:4"), ("launch", "num_nodes"), "4"),
        (("-m",), ("launch", "module"), True),
    ],
)
def test_the_source_of_a_setting_is_the_flag_as_it_was_written(
    tokens: tuple[str, ...], setting: tuple[str, str], value: object
) -> None:
    (entry,) = launch(*tokens, "train.py").layers.entries[setting]
    written = tokens[0].partition("=")[0]
    assert (entry.value, str(entry.source)) == (value, f"{written} on the command line")


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (("--rdzv-backend", "zeus"), "--rdzv-backend zeus: no such choice; say one of static, c10d"),
        (("--nnodes", "few:4"), "min_nodes='few': must be an integer"),
    ],
)
def test_a_wrong_value_of_a_setting_is_refused(tokens: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        launch(*tokens, "train.py")


def test_accelerates_spellings_mean_what_they_mean_there() -> None:
    arguments = launch(
        *("--num_processes", "8", "--num_machines=2", "--machine_rank", "1", "--main_process_ip", "10.0.0.1"),
        *("--main_process_port", "29501", "--gpu_ids", "0,1", "--num_cpu_threads_per_process", "4"),
        *("-m", "pkg.train", "--x"),
    )
    assert settings(arguments) == LaunchSettings(
        num_processes=8,
        num_nodes=2,
        node_rank=1,
        master_addr="10.0.0.1",
        master_port=29501,
        devices=(0, 1),
        threads_per_process=4,
        module=True,
    )
    assert (arguments.script, arguments.arguments) == ("pkg.train", ("--x",))


def test_a_file_of_settings_stands_under_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("launch:\n  num_processes: 4\n  max_restarts: 2\n")
    found = settings(launch("--config_file", str(file), "--num-processes", "2", "train.py"))
    assert (found.num_processes, found.max_restarts) == (2, 2)


def test_every_flag_has_one_meaning() -> None:
    parser = build_parser("launch", LaunchArguments, "Run it.")
    names = [flag.name for group in parser.groups.values() for flag in group]
    assert len(names) == len(set(names))


@dataclass(frozen=True, slots=True, kw_only=True)
class Shadowing:
    num_processes: int = field(default=2, metadata={"help": "Its own."})
    layers: Layers = field(default_factory=lambda: Layers({}))

    def __post_init__(self) -> None:
        if self.num_processes > 9:
            raise ValueError(f"num_processes={self.num_processes}: at most 9")


def test_a_commands_own_flag_stands_before_a_sections() -> None:
    parser = build_parser("check", Shadowing, "Check it.")
    arguments = parser.parse(["--num-processes", "3"])
    assert arguments.num_processes == 3
    assert "launch" not in {section for section, _ in arguments.layers.entries}
    assert parser.help(Page(), has_all=True).count("--num-processes ") == 1
    with pytest.raises(UsageError, match="num_processes=10: at most 9"):
        parser.parse(["--num-processes", "10"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Unread:
    layers: Layers = field(default_factory=lambda: Layers({}), metadata={"unread": ("launch",)})


def test_a_section_that_a_command_does_not_read_provides_no_flag() -> None:
    parser = build_parser("check", Unread, "Check it.")
    assert "launch" not in parser.groups
    with pytest.raises(UsageError, match="--num-nodes: no such flag"):
        parser.parse(["--num-nodes", "2"])


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatedArguments:
    script: str = field(metadata={"positional": True, "help": "What to run."})
    rest: tuple[str, ...] = field(default=(), metadata={"rest": True, "help": "Its own arguments."})
    option: tuple[str, ...] = field(default=(), metadata={"repeated": True, "help": "An option, each time."})


def test_a_repeated_flag_keeps_each_value_as_it_is() -> None:
    parser = build_parser("copy", RepeatedArguments, "Copy it.")
    found = parser.parse(["--option", "a=b,c", "--option=--x=1", "s.py", "--option", "theirs"])
    assert found.option == ("a=b,c", "--x=1")
    assert found.rest == ("--option", "theirs")
    assert parser.parse(["s.py"]).option == ()
