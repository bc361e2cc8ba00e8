"""Runs that are killed and go on with other numbers of processes read every sample of an epoch exactly once."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

NUM_SAMPLES = 211
KILLED = (137, -9)  # of several processes, and of one, which runs in the launcher's place

SCRIPT = """
import json, os, signal, sys, threading
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import DataLoader
from drivetrain import Accelerator

folder, kind, batch_size, accumulation, kill_step, kill_rank, moment = sys.argv[1:]
kill_step, kill_rank = int(kill_step), int(kill_rank)


class Stream(torch.utils.data.IterableDataset):
    number = 0

    def __iter__(self):
        while self.number < NUM_SAMPLES:
            self.number += 1
            yield torch.tensor(self.number - 1)
        self.number = 0

    def state_dict(self):
        return {"number": self.number}

    def load_state_dict(self, state):
        self.number = state["number"]


class Seen:
    def __init__(self):
        self.ids = []

    def state_dict(self):
        return {"ids": self.ids}

    def load_state_dict(self, state):
        self.ids = state["ids"]


def die(now):
    if now == moment and step == kill_step and accelerator.process_index == kill_rank:
        os.kill(os.getpid(), signal.SIGKILL)


accelerator = Accelerator(
    cpu=True, seed=3, project_dir=folder, gradient_accumulation_steps=int(accumulation),
    data={"strategy": kind if kind in ("block", "interleaved") else "interleaved"},
    sections={"state": {"watchdog": False}},
)
data = Stream() if kind == "stream" else torch.arange(NUM_SAMPLES)
loader = DataLoader(data, batch_size=int(batch_size), shuffle=kind != "stream", num_workers=int(kind == "workers"))
model = nn.Linear(1, 1)
model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3), loader)
seen, received = Seen(), []
accelerator.register_for_checkpointing(seen=seen)
if (Path(folder) / "checkpoints").exists() and any((Path(folder) / "checkpoints").glob("step-*/manifest.json")):
    accelerator.load_state()
step = 0
for batch in loader:
    received += accelerator.gather_for_metrics(batch).tolist()
    die("received")
    with accelerator.accumulate(model):
        accelerator.backward(model(batch[:, None].float()).square().mean() * 1e-6)
        optimizer.step()
        optimizer.zero_grad()
    if not accelerator.sync_gradients:
        continue
    seen.ids = [*seen.ids, *received]
    received = []
    step += 1
    die("stepped")
    if moment == "saving" and step == kill_step and accelerator.process_index == kill_rank:
        threading.Timer(0.002, os.kill, (os.getpid(), signal.SIGKILL)).start()
    if step % 2 == 0:
        accelerator.save_state()
if accelerator.is_main_process:
    (Path(folder) / "seen.json").write_text(json.dumps(seen.ids))
accelerator.end_training()
"""


def consume(folder: Path, kind: str, *, rng: random.Random, num_kills: int) -> tuple[list[int], list[int]]:
    """Launch until the epoch is over, killing a rank in the first launches: ids seen, and exit codes of launches."""
    script = folder / "train.py"
    script.write_text(SCRIPT.replace("NUM_SAMPLES", str(NUM_SAMPLES)))
    environment = {name: text for name, text in os.environ.items() if not name.startswith("DRIVETRAIN_")}
    codes: list[int] = []
    while not (folder / "seen.json").exists():
        num_processes = rng.choice([1, 2, 3])
        kill_step = rng.randint(1, 6) if len(codes) < num_kills else -1
        chosen = (rng.randint(1, 4), rng.randint(1, 3), kill_step, rng.randrange(num_processes))
        moment = rng.choice(["received", "stepped", "saving"])
        command = [
            sys.executable,
            "-m",
            "drivetrain_launcher",
            "launch",
            "--num-processes",
            str(num_processes),
        ]
        done = subprocess.run(
            [*command, str(script), str(folder), kind, *map(str, chosen), moment],
            env={**environment, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        codes.append(done.returncode)
        assert done.returncode in (0, *KILLED), done.stdout + done.stderr
        assert len(codes) < num_kills + 4
    return json.loads((folder / "seen.json").read_text()), codes


@pytest.mark.parametrize("kind", ["interleaved", "stream"])
def test_a_killed_epoch_goes_on_with_every_sample_once(tmp_path: Path, kind: str) -> None:
    seen, codes = consume(tmp_path, kind, rng=random.Random(f"short {kind}"), num_kills=2)
    assert sorted(seen) == list(range(NUM_SAMPLES))
    assert set(codes) & set(KILLED)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["interleaved", "block", "workers", "stream"])
def test_an_epoch_killed_many_times_goes_on_with_every_sample_once(tmp_path: Path, kind: str) -> None:
    seen, codes = consume(tmp_path, kind, rng=random.Random(f"long {kind}"), num_kills=5)
    assert sorted(seen) == list(range(NUM_SAMPLES))
    assert set(codes) & set(KILLED)
