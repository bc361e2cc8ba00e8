"""The completion of real shells, driven through a terminal as a user does."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from drivetrain_launcher.cli.main import main
from terminal import Terminal

SHELLS = {
    "bash": ("bash", "--norc", "--noprofile", "-i"),
    "zsh": ("zsh", "-f", "-i"),
    "fish": ("fish", "--no-config", "-i"),
}
LOAD = {
    "bash": "PS1='$ '; source ./complete",
    "zsh": "PROMPT='$ '; autoload -Uz compinit; compinit -D; source ./complete",
    "fish": "function fish_prompt; echo '$ '; end; source ./complete",
}
KILL_LINE, CLEAR_SCREEN = "\x15", "\x0c"
Type = Callable[[str], Terminal]


@pytest.fixture(scope="module")
def scripts() -> dict[str, str]:
    """The script of each shell, as the command prints it."""
    command = [sys.executable, "-m", "drivetrain_launcher", "completion"]
    return {
        shell: subprocess.run(
            [*command, shell], capture_output=True, text=True, timeout=100, check=True
        ).stdout
        for shell in SHELLS
    }


@pytest.fixture(params=SHELLS, scope="module")
def shell(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, scripts: dict[str, str]
) -> Iterator[Terminal]:
    """A shell that has loaded its script, in a folder with files of the user."""
    name: str = request.param
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed: apt-get install {name}")
    folder = tmp_path_factory.mktemp(name)
    (folder / "complete").write_text(scripts[name])
    (folder / "train_model.py").touch()
    (folder / "settings_of_mine.yaml").touch()
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder), "INPUTRC": "/dev/null", "TERM": "xterm"}
    terminal = Terminal(SHELLS[name], folder=folder, environment=environment, columns=160, rows=100)
    terminal.wait_for(r"[$#%>] ?$")
    terminal.press(LOAD[name], "; echo rea''dy\r")
    terminal.wait_for("ready")
    yield terminal
    terminal.close()


@pytest.fixture
def typed(shell: Terminal) -> Type:
    """Type text into an empty line."""

    def press(text: str) -> Terminal:
        shell.press(KILL_LINE, CLEAR_SCREEN)
        shell.wait_for(r"\A\$\Z")
        shell.press(text)
        return shell

    return press


@pytest.mark.default_cases("zsh")
def test_a_command_is_completed(typed: Type) -> None:
    typed("drivetrain laun\t@").wait_for("drivetrain launch @")


def test_a_group_and_its_members_are_completed(typed: Type) -> None:
    typed("drivetrain checkp\tver\t@").wait_for("drivetrain checkpoint verify @")


def test_a_command_that_is_a_group_too_has_both(typed: Type) -> None:
    typed("drivetrain config val\t@").wait_for("drivetrain config validate @")


def test_a_flag_of_an_installed_package_is_completed(typed: Type) -> None:
    typed("drivetrain launch --model-activation-check\t@").wait_for("--model-activation-checkpointing @")


def test_the_values_of_a_flag_are_completed(typed: Type) -> None:
    typed("drivetrain launch --fsdp-strategy hyb\t@").wait_for("--fsdp-strategy hybrid_shard @")


@pytest.mark.default_cases("zsh")
def test_names_of_installed_plugins_are_completed(typed: Type) -> None:
    typed("drivetrain launch --backend deep\t@").wait_for("--backend deepspeed @")
    typed("drivetrain submit --on kub\t@").wait_for("--on kubernetes @")


def test_values_are_completed_behind_an_equals_sign(typed: Type) -> None:
    typed("drivetrain launch --fsdp-strategy=hyb\t@").wait_for("--fsdp-strategy=hybrid_shard ?@")


def test_files_are_completed_for_the_script_behind_a_flag_with_a_value(typed: Type) -> None:
    typed("drivetrain launch --num-processes 2 tra\t@").wait_for("2 train_model.py @")


def test_files_are_completed_for_a_flag_that_takes_one(typed: Type) -> None:
    typed("drivetrain launch --config sett\t@").wait_for("--config settings_of_mine.yaml @")


def test_the_scripts_own_arguments_are_files_and_no_flags_of_the_launcher(typed: Type) -> None:
    typed("drivetrain launch train_model.py sett\t@").wait_for("train_model.py settings_of_mine.yaml @")


def test_a_switch_does_not_take_the_next_word(typed: Type) -> None:
    typed("drivetrain launch --dry-run tra\t@").wait_for("--dry-run train_model.py @")


def test_the_scripts_are_printed_without_an_import_of_torch() -> None:
    source = (
        "import sys; from drivetrain_launcher.cli.main import main; main(['completion', 'bash'])\n"
        "sys.stderr.write(str('torch' in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=100, check=True
    )
    assert done.stderr == "False"


@pytest.mark.undisturbed
def test_a_completion_takes_less_than_a_tenth_of_a_second(scripts: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "complete").write_text(scripts["bash"])
    source = (
        "source ./complete; COMP_WORDS=(drivetrain launch --num-processes 2 --fsdp-s); COMP_CWORD=4\n"
        "compopt() { :; }; TIMEFORMAT=%R; time _drivetrain; echo ${COMPREPLY[@]}"
    )
    seconds: list[float] = []
    for _ in range(5):
        done = subprocess.run(
            ["bash", "-c", source], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True
        )
        assert done.stdout.split() == ["--fsdp-strategy", "--fsdp-shard-size"]
        seconds.append(float(done.stderr))
    assert min(seconds) < 0.1


def test_another_shell_is_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "fsh"]) == 2
    assert "there is no such script; did you mean fish; say bash, zsh or fish" in capsys.readouterr().err
