"""The commands of docs/howto/tpu.md that need no TPU, run as they stand there."""

import os
import subprocess
from pathlib import Path

from launch_fixtures import clean_environment

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "tpu.md"
SCRIPT = """
from drivetrain import Accelerator

accelerator = Accelerator()
print(f"rank {accelerator.process_index} of {accelerator.num_processes} on {accelerator.device}")
"""


def test_a_job_is_tried_without_a_tpu_by_the_commands_of_the_page(python: str, tmp_path: Path) -> None:
    command = tmp_path / "bin" / "drivetrain"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {python} -m drivetrain_launcher "$@"\n')
    command.chmod(0o700)
    (tmp_path / "train.py").write_text(SCRIPT)
    section = PAGE.read_text().partition("## Without a TPU")[2].partition("\n## ")[0]
    commands = [line.removeprefix("$ ") for line in section.splitlines() if line.startswith("$ ")]
    path = f"{command.parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["sh", "-ec", "\n".join(commands)],
        cwd=tmp_path, env=clean_environment(PATH=path), capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "rank 0 of 2 on cpu" in done.stdout
    assert "rank 1 of 2 on cpu" in done.stdout
    assert "2 processes under torch's elastic agent: 2 nodes x 1" in done.stdout
