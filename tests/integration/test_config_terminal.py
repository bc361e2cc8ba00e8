"""`drivetrain config` as a user meets it, on a terminal of its own."""

import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import yaml

from terminal import CTRL_C, DOWN, ENTER, Terminal

Open = Callable[..., Terminal]
COMMAND = [sys.executable, "-m", "drivetrain_launcher", "config"]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    """Start `drivetrain config ARGUMENTS...` on a terminal, in `tmp_path`."""
    terminals: list[Terminal] = []

    def open_one(
        *arguments: str, term: str = "xterm-256color", rows: int = 100, command: Sequence[str] = COMMAND
    ) -> Terminal:
        kept = {
            name: text for name, text in os.environ.items() if not name.startswith(("DRIVETRAIN_", "SLURM_"))
        }
        environment = {
            **kept,
            "HOME": str(tmp_path),
            "XDG_CONFIG_HOME": str(tmp_path / "of_the_user"),
            "TERM": term,
        }
        terminals.append(
            Terminal([*command, *arguments], folder=tmp_path, environment=environment, rows=rows)
        )
        return terminals[-1]

    yield open_one
    for terminal in terminals:
        terminal.close()


def written(folder: Path) -> dict[str, dict[str, object]]:
    return yaml.safe_load((folder / "drivetrain.yaml").read_text())


def test_arrow_keys_and_enter_choose_and_what_is_chosen_raises_its_questions(
    opened: Open, tmp_path: Path
) -> None:
    terminal = opened("--state-device", "cpu")
    terminal.wait_for("How many machines train together")
    terminal.press(ENTER)
    terminal.wait_for("How many processes train on this machine")
    terminal.press("2", ENTER)
    terminal.wait_for(r"(?s)How do the processes share the model\?.*deepspeed")
    terminal.wait_for("Recommended: auto: the model and this hardware decide")
    terminal.wait_for(" » auto")
    for backend in ("ddp", "deepspeed"):
        terminal.press(DOWN)
        terminal.wait_for(f" » {backend}")
    terminal.press(DOWN)
    terminal.wait_for(" » fsdp")
    terminal.press(ENTER)
    terminal.wait_for("micro-batches")
    terminal.press("4", ENTER)
    terminal.wait_for("Folder of checkpoints")
    terminal.press("none", ENTER)
    terminal.wait_for("What does each rank keep")
    terminal.press(ENTER)
    terminal.wait_for("Keep shards")
    terminal.press(ENTER)
    terminal.wait_for("Set anything else")
    terminal.press(ENTER)
    assert terminal.end() == 0
    assert "drivetrain launch --num-processes 2 --backend fsdp" in terminal.text
    assert written(tmp_path) == {
        "launch": {"num_processes": 2, "num_nodes": 1},
        "run": {"backend": "fsdp", "gradient_accumulation_steps": 4},
        "fsdp": {"strategy": "full_shard", "offload": False},
        "state": {"device": "cpu"},
    }
    assert "# Why: given by --state-device." in (tmp_path / "drivetrain.yaml").read_text()


@pytest.mark.slow
def test_a_wrong_number_is_asked_again_with_the_error(opened: Open) -> None:
    terminal = opened()
    terminal.wait_for("How many machines train together")
    terminal.press("x", ENTER)
    terminal.wait_for("'x': must be an integer")
    terminal.wait_for("How many machines train together", times=2)
    terminal.press("0", ENTER)
    terminal.wait_for("num_nodes=0: must be at least 1")
    terminal.wait_for("How many machines train together", times=3)
    terminal.press("1", ENTER)
    terminal.wait_for("How many processes")


@pytest.mark.slow
def test_ctrl_c_writes_nothing(opened: Open, tmp_path: Path) -> None:
    terminal = opened()
    terminal.wait_for("How many machines train together")
    terminal.press(ENTER)
    terminal.wait_for("How many processes")
    terminal.press(CTRL_C)
    assert terminal.end() == 130
    assert "interrupted; nothing was written" in terminal.text
    assert not (tmp_path / "drivetrain.yaml").exists()


def test_a_terminal_that_cannot_move_its_cursor_is_refused_with_the_way_out(
    opened: Open, tmp_path: Path
) -> None:
    terminal = opened(term="dumb")
    assert terminal.end() != 0
    assert "TERM=dumb: the questions need a terminal that can move its cursor" in terminal.text
    assert "say --yes to take every recommended answer" in " ".join(terminal.text.split())
    assert not (tmp_path / "drivetrain.yaml").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("section", "answers", "settings"),
    [("precision", {}, {"initial_scale": 65536.0}), ("parallel", {"divide each layer": "2"}, {"tensor": 2})],
)
def test_a_section_can_be_gone_through_in_full(
    opened: Open, tmp_path: Path, section: str, answers: dict[str, str], settings: dict[str, object]
) -> None:
    few = ("--num-nodes", "1", "--num-processes", "1", "--project-dir", "none")
    terminal = opened(*few, rows=400)  # all questions of the section stay in sight
    terminal.wait_for("micro-batches")
    terminal.press(ENTER)
    shown = terminal.wait_for(r"(?s)Set anything else.*\(arrow keys, then Enter\).* » .*precision +")
    choices = shown[shown.index(" » ") :].splitlines()
    terminal.press(*[DOWN] * next(row for row, line in enumerate(choices) if f"{section} " in line), ENTER)
    question = "Set anything else"
    while True:
        shown = terminal.wait_for(rf"(?m)^\? (?!{re.escape(question)})")  # an answered one has no mark
        question = re.findall(r"(?m)^\? ([^?]+)", shown)[-1]
        if question.startswith("Set anything else"):
            break
        terminal.press(*(text for words, text in answers.items() if words in question), ENTER)
    terminal.press(ENTER)
    assert terminal.end() == 0
    assert settings.items() <= written(tmp_path)[section].items()


@pytest.mark.slow
def test_a_file_that_is_there_is_replaced_when_the_user_says_so_and_a_copy_kept(
    opened: Open, tmp_path: Path
) -> None:
    before = "run:\n  gradient_accumulation_steps: 4  # mine\nstate:\n  timeout_seconds: 120\n"
    (tmp_path / "drivetrain.yaml").write_text(before)
    terminal = opened()
    terminal.wait_for("drivetrain.yaml is there. Replace it")
    terminal.press(ENTER)
    terminal.wait_for("How many machines")
    terminal.press(ENTER)
    terminal.wait_for("How many processes")
    terminal.press(ENTER)
    terminal.wait_for("micro-batches")
    terminal.wait_for(r"Recommended: 4: as before, in drivetrain\.yaml:2\.")
    terminal.press(ENTER)
    terminal.wait_for("Folder of checkpoints")
    terminal.press("none", ENTER)
    terminal.wait_for("Set anything else")
    terminal.press(ENTER)
    assert terminal.end() == 0
    assert (tmp_path / "drivetrain.yaml.bak").read_text() == before
    assert written(tmp_path)["run"] == {"gradient_accumulation_steps": 4}
    assert written(tmp_path)["state"] == {"timeout_seconds": 120.0}


@pytest.mark.slow
def test_a_file_that_is_there_is_kept_when_the_user_says_so(opened: Open, tmp_path: Path) -> None:
    (tmp_path / "drivetrain.yaml").write_text("run:\n  seed: 1\n")
    terminal = opened()
    terminal.wait_for("drivetrain.yaml is there. Replace it")
    terminal.press(DOWN, ENTER)
    assert terminal.end() == 0
    assert (tmp_path / "drivetrain.yaml").read_text() == "run:\n  seed: 1\n"
    assert not (tmp_path / "drivetrain.yaml.bak").exists()


def test_a_terminal_that_goes_away_ends_the_questions(opened: Open, tmp_path: Path) -> None:
    terminal = opened()
    terminal.wait_for("How many machines")
    terminal.process.send_signal(signal.SIGHUP)
    assert terminal.end() != 0
    assert not (tmp_path / "drivetrain.yaml").exists()


def test_without_the_library_the_extra_is_named(opened: Open) -> None:
    source = (
        "import sys; sys.modules['questionary'] = None\n"
        "from drivetrain_launcher.cli.main import main; sys.exit(main(['config', '--num-nodes', '1']))"
    )
    terminal = opened(command=[sys.executable, "-c", source])
    assert terminal.end() != 0
    assert "pip install 'drivetrain-launcher[wizard]'" in terminal.text
