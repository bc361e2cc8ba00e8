import re
import subprocess
import sys
from pathlib import Path

import pytest

from drivetrain_config import commands, sections
from drivetrain_launcher.cli.help_page import Page
from drivetrain_launcher.cli.main import main
from drivetrain_launcher.cli.overview import members_of, overview

NEARLY = str(Path(__file__).with_name("test_mian.py"))
needs_umbrella = pytest.mark.skipif(not sections(only={"run"}), reason="the section run is not installed")


def test_help_lists_the_installed_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^Run\n  launch +Launch a script on many processes\.$", shown, re.MULTILINE)
    assert re.search(r"^Set up\n(  .*\n)*  env +Show versions, devices", shown, re.MULTILINE)
    assert re.search(r"^  config show +Show every setting", shown, re.MULTILINE)


def test_each_command_is_one_line_of_80_columns_in_one_voice() -> None:
    points = commands()
    groups = {name.partition(".")[0] for name in points if "." in name} - points.keys()
    texts = [overview(points, "", Page())]
    texts += [overview(members_of(points, group), f"{group} ", Page()) for group in sorted(groups)]
    for line in "\n".join(texts).splitlines():
        assert len(line) <= 80, line
        if line.startswith("  "):  # a verb begins it: it says what the command does
            assert re.match(r"  [a-z0-9 -]+(COMMAND)? +[A-Z][a-z]+ .*\.$", line), line
    assert "\nMore\n" not in texts[0]


def test_help_imports_no_command_and_no_torch() -> None:
    source = (
        "import sys; from drivetrain_launcher.cli.main import main; main(['--help'])\n"
        "print([name for name in sys.modules if name.startswith(('torch', 'drivetrain_launcher.cli.commands.'))])"
    )
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


def test_no_command_shows_help_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "usage: drivetrain COMMAND" in capsys.readouterr().out


def test_an_unknown_command_names_the_closest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lunch"]) == 2
    assert "lunch: no such command; did you mean launch" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("drivetrain ")


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (["launch"], "SCRIPT is missing"),
        (
            ["launch", "--num-proceses", "2", "x.py"],
            "--num-proceses: no such flag; did you mean --num-processes",
        ),
        (["launch", "--num-processes", "x", "x.py"], "launch.num_processes='x'"),
        (["launch", "--num-processes", "0", "x.py"], r"launch.num_processes=0: must be at least 1"),
        (["launch", "--config", "nowhere.yaml", "x.py"], "nowhere.yaml"),
        (
            ["launch", "--state-timeout-seconds", "-3", "x.py"],
            "state.timeout_seconds=-3.0: a finite number of seconds above 0 is allowed; from --state-",
        ),
        (["launch", NEARLY], f"{NEARLY}: no such script (looked for {NEARLY}); did you mean {__file__}"),
        (
            ["launch", "--program", "nosuchprogram"],
            "--program nosuchprogram: no such program, here or on PATH",
        ),
        (["launch", "--cpu", "--log-dir", "/proc/x", "-m", "json.tool"], "--log-dir /proc/x: "),
        (
            ["submit", "--on", "local", "--cpu", "--log-dir", "/proc/x", "-m", "json.tool"],
            "say another folder with --log-dir",
        ),
        (["launch", "-m", "jsn.tool"], "-m jsn.tool: there is no module jsn in "),
        (
            ["submit", "--on", "slurm", "--cpu", "--dry-run", "-m", "jsn.tool"],
            "-m jsn.tool: there is no module jsn in ",
        ),
        (
            ["launch", "--through", "no_such_module", "-m", "json.tool"],
            "--through no_such_module: the module no_such_module is not installed; pip install no-such-module",
        ),
        (["launch", "--through", "gate", "--program", "true"], "through='gate': program=True is set too"),
        pytest.param(
            ["launch", "--num-processes", "2", "--backend", "fspd", "-m", "json.tool"],
            "run.backend='fspd': no installed package provides it; did you mean fsdp",
            marks=needs_umbrella,
        ),
        pytest.param(
            ["launch", "--log-with", "jsonl,wandbb", "--project-dir", "out", "-m", "json.tool"],
            "run.log_with='wandbb': no installed package provides it; did you mean wandb",
            marks=needs_umbrella,
        ),
        (
            ["launch", "--num-nodes", "2", "--dry-run", "-m", "json.tool"],
            "--master-addr HOST (a name or address of the node with rank 0), and which it is, --node-rank 0 to 1",
        ),
    ],
)
def test_a_mistake_is_told_in_a_line(
    tokens: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(tokens) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("drivetrain: error: ")
    assert message in shown.err
    assert shown.err.count("\n") == 1


PETS = {
    "pets-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: pets\nVersion: 1.0\n",
    "pets-1.0.dist-info/entry_points.txt": "[drivetrain.commands]\n"
    "pets.feed = pets.commands.feed:run\npets.wash = pets.commands.wash:run\n",
    "pets/__init__.py": "",
    "pets/commands/__init__.py": '"""Look after pets."""\n',
    "pets/commands/feed.py": '''"""Feed one of them."""

TOPIC = "Animals"

from dataclasses import dataclass, field

@dataclass(frozen=True, kw_only=True)
class Feed:
    name: str = field(metadata={"positional": True, "help": "Whom."})
    num_meals: int = field(default=1, metadata={"help": "How often."})

def run(feed: Feed) -> int:
    """Feed one of them."""
    print(feed.name, feed.num_meals)
    return 0
''',
    "pets/commands/wash.py": '"""Wash one of them."""\nraise RuntimeError("imported, though another was chosen")\n',
}


@pytest.fixture
def pets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package that brings a group of commands."""
    for name, content in PETS.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("pets")
class TestGroup:
    def test_two_words_choose_a_command_and_import_it_alone(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["pets", "feed", "Rex", "--num-meals", "2"]) == 0
        assert capsys.readouterr().out == "Rex 2\n"

    def test_it_is_a_line_in_the_help_and_has_help_of_its_own(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["--help"]) == 0
        shown = capsys.readouterr().out
        assert re.search("^Animals\n  pets feed +Feed one of them.$", shown, re.MULTILINE)
        assert re.search("^More\n  pets wash +Wash one of them.$", shown, re.MULTILINE)
        assert main(["pets", "--help"]) == 0
        assert capsys.readouterr().out == (
            "usage: drivetrain pets COMMAND [flags] ...\n\nLook after pets.\n\n"
            "  feed  Feed one of them.\n  wash  Wash one of them.\n\n"
            "drivetrain pets COMMAND --help describes each.\n"
        )

    def test_the_help_of_a_command_has_both_words(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit, match="0"):
            main(["pets", "feed", "--help"])
        assert capsys.readouterr().out.startswith("usage: drivetrain pets feed [flags] NAME\n")

    def test_the_group_alone_fails_and_an_unknown_word_names_the_closest(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["pets"]) == 2
        assert main(["pets", "fed"]) == 2
        assert "pets fed: no such command; did you mean pets feed; the" in capsys.readouterr().err
        assert main(["pet"]) == 2
        assert "pet: no such command; did you mean pets; the" in capsys.readouterr().err

    def test_a_large_group_is_one_line(self) -> None:
        found = commands()
        more = {f"pets.wash{number}": found["pets.wash"] for number in range(5)}
        shown = overview({**found, **more}, "", Page())
        assert re.search("^More\n  pets COMMAND +Look after pets.$", shown, re.MULTILINE)
        shown = overview({**found, **more, "pets": found["pets.wash"]}, "", Page())
        assert re.search("^More\n  pets +Wash one of them.\n  pets COMMAND +Look", shown, re.MULTILINE)


GARDEN = {
    "garden-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: garden\nVersion: 1.0\n",
    "garden-1.0.dist-info/entry_points.txt": "[drivetrain.commands]\ngarden = garden.water:run\n",
    "garden/__init__.py": "",
    "garden/arguments.py": PETS["pets/commands/feed.py"],
    "garden/water.py": '''"""Water the garden."""
from garden.arguments import Feed

raise RuntimeError("imported")

def run(feed: Feed) -> int:
    """Water the garden, and feed who lives there."""
    return 0
''',
}


def test_arguments_in_a_module_of_their_own_are_parsed_without_the_commands_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, content in GARDEN.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(SystemExit, match="0"):
        main(["garden", "--help"])
    assert "Water the garden, and feed who lives there." in capsys.readouterr().out
    assert main(["garden", "--num-meals", "many", "Rex"]) == 2
    with pytest.raises(RuntimeError, match="imported"):
        main(["garden", "Rex"])
