"""A replica that is killed between two exchanges of `local_updates`, and comes back with its launch."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from processes import environment_alone

TRAIN = """
import json, os, signal, sys
from contextlib import suppress
from functools import partial
from pathlib import Path
import torch
from drivetrain import Accelerator
from drivetrain_checkpoint import NoCheckpointError

folder, killed = Path(sys.argv[1]), sys.argv[2] == "killed"
accelerator = Accelerator(backend="ddp", cpu=True, project_dir=folder)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
outer = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
local = accelerator.local_updates(model, every=4, outer=outer)
with suppress(NoCheckpointError):
    accelerator.load_state()
begun = local.num_steps
with local:
    for step in range(begun, 18):
        if killed and step == 10 and not begun and accelerator.process_index == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        drawn = torch.Generator().manual_seed(100 * step + accelerator.process_index)
        x = torch.randn(6, 4, dtype=torch.double, generator=drawn)
        accelerator.backward((model(x) - x.sum(1, keepdim=True)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        if step == 5:
            accelerator.save_state()
weights = [p.tolist() for p in accelerator.unwrap_model(model).parameters()]
if accelerator.is_main_process:
    (folder / "found.json").write_text(json.dumps([begun, local.num_steps, weights]))
accelerator.end_training()
"""


def launched(folder: Path, word: str) -> Any:
    """Return the step that the last start of a launch began at, the step of its end, and the weights."""
    folder.mkdir()
    (folder / "train.py").write_text(TRAIN)
    command = [
        sys.executable,
        "-m",
        "drivetrain_launcher",
        "launch",
        "--num-processes",
        "2",
        "--max-restarts",
        "1",
    ]
    done = subprocess.run(
        [*command, str(folder / "train.py"), str(folder), word],
        env=environment_alone(),
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "found.json").read_text())


@pytest.mark.slow
def test_a_replica_that_is_killed_comes_back_and_the_run_goes_on_as_undisturbed(tmp_path: Path) -> None:
    begun, ended, weights = launched(tmp_path / "killed", "killed")
    assert (begun, ended) == (6, 18)
    begun, ended, expected = launched(tmp_path / "undisturbed", "undisturbed")
    assert (begun, ended) == (0, 18)
    assert weights == expected
