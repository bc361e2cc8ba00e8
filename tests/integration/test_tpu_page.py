"""The commands of docs/howto/tpu.md that need no TPU, run as they stand there."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from launch_fixtures import Launch, clean_environment

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "tpu.md"
SCRIPT = """
from drivetrain import Accelerator

accelerator = Accelerator()
print(f"rank {accelerator.process_index} of {accelerator.num_processes} on {accelerator.device}")
"""


def commands_of_the_page() -> list[str]:
    section = PAGE.read_text().partition("## Without a TPU")[2].partition("\n## ")[0]
    return [line.removeprefix("$ ") for line in section.splitlines() if line.startswith("$ ")]


def test_what_a_host_would_do_is_printed_by_the_command_of_the_page(
    drivetrain_here: Launch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    *variables, program, launch, dry_run, script = shlex.split(commands_of_the_page()[-1])
    assert (program, launch) == ("drivetrain", "launch")
    for variable in variables:
        monkeypatch.setenv(*variable.split("=", 1))
    done = drivetrain_here(launch, dry_run, script)
    assert done.returncode == 0, done.stderr
    assert "2 processes under torch's elastic agent: 2 nodes x 1" in done.stdout


@pytest.mark.slow
def test_a_job_is_tried_without_a_tpu_by_the_commands_of_the_page(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["sh", "-ec", "\n".join(commands_of_the_page())],
        cwd=tmp_path, env=clean_environment(PATH=path), capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "rank 0 of 2 on cpu" in done.stdout
    assert "rank 1 of 2 on cpu" in done.stdout
    assert "2 processes under torch's elastic agent: 2 nodes x 1" in done.stdout
