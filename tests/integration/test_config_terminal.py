"""`drivetrain config` as a user meets it, on a terminal of its own."""

import os
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
    terminal.wait_for("Recommended: auto: replicas are the fastest")
    terminal.wait_for(" » auto")
    terminal.press(DOWN)
    terminal.wait_for(" » deepspeed")
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
    terminal.wait_for("Recompute activations")
    terminal.press(ENTER)
    terminal.wait_for("Set anything else")
    terminal.press(ENTER)
    assert terminal.end() == 0
    assert "drivetrain launch --num-processes 2 --backend fsdp" in terminal.text
    assert written(tmp_path) == {
        "launch": {"num_processes": 2, "num_nodes": 1},
        "run": {"backend": "fsdp", "gradient_accumulation_steps": 4},
        "fsdp": {"strategy": "full_shard", "offload": False, "activation_checkpointing": "none"},
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


@pytest.mark.parametrize("term", ["xterm-256color", pytest.param("dumb", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_ctrl_c_writes_nothing(opened: Open, tmp_path: Path, term: str) -> None:
    terminal = opened(term=term)
    terminal.wait_for("How many machines train together")
    terminal.press(ENTER)
    terminal.wait_for("How many processes")
    terminal.press(CTRL_C)
    assert terminal.end() == 130
    assert "interrupted; nothing was written" in terminal.text
    assert not (tmp_path / "drivetrain.yaml").exists()


@pytest.mark.slow
def test_a_terminal_that_cannot_move_its_cursor_gets_numbered_lines(opened: Open, tmp_path: Path) -> None:
    terminal = opened("--num-nodes", "1", "--num-processes", "2", "--project-dir", "none", term="dumb")
    terminal.wait_for(r"Number of the answer, from 1 to 3 \[1\]:")
    terminal.press("9\n")
    terminal.wait_for("'9': say a number from 1 to 3")
    terminal.press("3\n")
    terminal.wait_for("micro-batches")
    terminal.press("\n")
    terminal.wait_for("What does each rank keep")
    terminal.press("2\n")
    terminal.wait_for("Keep shards")
    terminal.press("\n")
    terminal.wait_for("Recompute activations")
    terminal.press("\n")
    terminal.wait_for(r"(?s)Set anything else.*Number of the answer")
    terminal.press("\n")
    assert terminal.end() == 0
    assert written(tmp_path)["run"]["backend"] == "fsdp"
    assert written(tmp_path)["fsdp"]["strategy"] == "shard_grad_op"


@pytest.mark.slow
def test_a_section_can_be_gone_through_in_full(opened: Open, tmp_path: Path) -> None:
    few = ("--num-nodes", "1", "--num-processes", "1", "--project-dir", "none")
    terminal = opened(*few, term="dumb", rows=400)  # all questions of the section stay in sight
    terminal.wait_for("micro-batches")
    terminal.press("\n")
    shown = terminal.wait_for(r"(?s)Set anything else.*Number of the answer")
    number = next(line.split(")")[0].strip() for line in shown.splitlines() if ") precision:" in line)
    terminal.press(f"{number}\n")
    asked = shown.count("Recommended:")
    while terminal.wait_for("Recommended:", times=asked + 1).count("Set anything else") == 1:
        terminal.press("\n")
        asked += 1
    terminal.wait_for(r"\[1\]: ?$")
    terminal.press("\n")
    assert terminal.end() == 0
    assert "initial_scale" in written(tmp_path)["precision"]


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


def test_without_the_library_the_answers_are_numbered_and_the_extra_is_named(opened: Open) -> None:
    source = (
        "import sys; sys.modules['questionary'] = None\n"
        "from drivetrain_launcher.cli.main import main; sys.exit(main(['config', '--num-nodes', '1']))"
    )
    terminal = opened(command=[sys.executable, "-c", source])
    terminal.wait_for(r"pip install 'drivetrain-launcher\[wizard\]' to answer with the arrow keys")
    terminal.wait_for(r"(?s)How many processes.*Answer \[1\]:")
    terminal.press(CTRL_C)
    assert terminal.end() == 130
