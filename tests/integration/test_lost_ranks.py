"""Where a dispatched loader's rank is lost, the launcher names that rank, and none of the others waits for it."""

import subprocess
from pathlib import Path

import pytest

SCRIPT = """
import os, signal, sys
import torch
from torch.utils.data import DataLoader, IterableDataset
from drivetrain import Accelerator

lost, how = int(sys.argv[1]), sys.argv[2]


class Stream(IterableDataset):
    def __iter__(self):
        for number in range(100_000):
            if number == 50 and how == "raises":
                raise OSError("the disk is gone")
            yield torch.full((1000,), float(number))


accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(1000, 1)
model, loader = accelerator.prepare(model, DataLoader(Stream(), batch_size=8))
for number, batch in enumerate(loader):
    if number == 5 and how == "dies" and accelerator.process_index == lost:
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(("lost", "how"), [(0, "dies"), (1, "dies"), (0, "raises")])
@pytest.mark.default_cases("1-dies")
def test_the_rank_that_was_lost_is_named(tmp_path: Path, python: str, lost: int, how: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [python, "-m", "drivetrain_launcher", "launch", "--num-processes", "2"]
    done = subprocess.run(
        [*command, str(script), str(lost), how], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == (137 if how == "dies" else 1)
    # Below the lines about the other ranks stands the failure that began it.
    root = done.stderr.rpartition("drivetrain: the other ranks of this node:")[2]
    assert f"drivetrain: rank {lost} (local rank {lost}, process" in root
    assert ("was ended by SIGKILL" if how == "dies" else "OSError: the disk is gone") in root
