import subprocess
import sys

import pytest

from drivetrain_launcher.cli import main


def test_help_lists_the_installed_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert "launch  Run a script on one process or many" in shown
    assert "env     Show versions, devices" in shown


def test_help_imports_no_command_and_no_torch() -> None:
    source = (
        "import sys; from drivetrain_launcher.cli import main; main(['--help'])\n"
        "print([name for name in sys.modules if name.startswith(('torch', 'drivetrain_launcher.commands.'))])"
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
        (["launch", "nowhere.py"], "nowhere.py: no such script"),
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
