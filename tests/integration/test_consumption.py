"""Runs that are killed and go on with other numbers of processes read every sample of each epoch once, in its order.

What was trained on is noted beside the checkpoints, with each optimizer step, in a file that no resume takes back.
"""

import json
import os
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from drivetrain_data import Shard, shard_loader

NUM_SAMPLES, NUM_EPOCHS, SEED = 53, 4, 3
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


class Steps:
    def __init__(self):
        self.number = 0

    def state_dict(self):
        return {"number": self.number}

    def load_state_dict(self, state):
        self.number = state["number"]


def note(ids):
    line = json.dumps({"step": steps.number, "epoch": loader.epoch, "ids": ids}) + "\\n"
    file = os.open(Path(folder) / "consumed.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, line.encode())
    os.fsync(file)
    os.close(file)


def die(now):
    if now == moment and step == kill_step and accelerator.process_index == kill_rank:
        os.kill(os.getpid(), signal.SIGKILL)


accelerator = Accelerator(
    cpu=True, seed=SEED, project_dir=folder, gradient_accumulation_steps=int(accumulation),
    data={"strategy": kind if kind in ("block", "interleaved") else "interleaved"},
    sections={"state": {"watchdog": False}},
)
data = Stream() if kind == "stream" else torch.arange(NUM_SAMPLES)
loader = DataLoader(data, batch_size=int(batch_size), shuffle=kind != "stream", num_workers=int(kind == "workers"))
model = nn.Linear(1, 1)
model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3), loader)
steps, received = Steps(), []
accelerator.register_for_checkpointing(steps=steps)
if (Path(folder) / "checkpoints").exists() and any((Path(folder) / "checkpoints").glob("step-*/manifest.json")):
    accelerator.load_state()
step = 0  # of this launch
for _ in range(loader.epoch, NUM_EPOCHS):
    for batch in loader:
        received += accelerator.gather_for_metrics(batch).tolist()
        die("received")
        with accelerator.accumulate(model):
            accelerator.backward(model(batch[:, None].float()).square().mean() * 1e-6)
            optimizer.step()
            optimizer.zero_grad()
        if not accelerator.sync_gradients:
            continue
        steps.number += 1
        if accelerator.is_main_process:
            note(received)
        received = []
        step += 1
        die("stepped")
        if moment == "saving" and step == kill_step and accelerator.process_index == kill_rank:
            threading.Timer(0.002, os.kill, (os.getpid(), signal.SIGKILL)).start()
        if step % 2 == 0:
            accelerator.save_state()
if accelerator.is_main_process:
    (Path(folder) / "done").touch()
accelerator.end_training()
"""


def consume(folder: Path, kind: str, *, python: str, rng: random.Random, num_kills: int) -> list[int]:
    """Launch until the epochs are over, killing a rank in the first launches; the launches' exit codes."""
    script = folder / "train.py"
    source = SCRIPT
    for name, number in (("NUM_SAMPLES", NUM_SAMPLES), ("NUM_EPOCHS", NUM_EPOCHS), ("SEED", SEED)):
        source = source.replace(name, str(number))
    script.write_text(source)
    environment = {name: text for name, text in os.environ.items() if not name.startswith("DRIVETRAIN_")}
    codes: list[int] = []
    while not (folder / "done").exists():
        num_processes = rng.choice([1, 2, 3])
        kill_step = rng.randint(1, 6) if len(codes) < num_kills else -1
        chosen = (rng.randint(1, 4), rng.randint(1, 3), kill_step, rng.randrange(num_processes))
        moment = rng.choice(["received", "stepped", "saving"])
        command = [
            python,
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
    return codes


def consumed(folder: Path) -> list[list[int]]:
    """The samples of each epoch in the order in which they were trained on, without what a resume took back."""
    lines: list[dict[str, Any]] = []
    for text in (folder / "consumed.jsonl").read_text().splitlines():
        line = json.loads(text)
        lines = [earlier for earlier in lines if earlier["step"] < line["step"]]
        lines.append(line)
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return [
        [i for line in lines if line["epoch"] == epoch for i in line["ids"]] for epoch in range(NUM_EPOCHS)
    ]


def check(kind: str, epochs: list[list[int]]) -> None:
    """Every epoch holds each sample once, and in the order of a run of one process that nobody stops."""
    assert [sorted(epoch) for epoch in epochs] == [list(range(NUM_SAMPLES))] * NUM_EPOCHS
    if kind == "block":
        return  # which samples share a step depends on the number of ranks
    data = DataLoader(range(NUM_SAMPLES), shuffle=kind != "stream")  # pyright: ignore[reportArgumentType]
    alone = shard_loader(data, Shard(0, 1), seed=SEED)
    assert epochs == [torch.cat(list(alone)).tolist() for _ in range(NUM_EPOCHS)]


def test_killed_epochs_go_on_with_every_sample_once(tmp_path: Path, python: str) -> None:
    codes = consume(
        tmp_path, "interleaved", python=python, rng=random.Random("short interleaved"), num_kills=2
    )
    check("interleaved", consumed(tmp_path))
    assert set(codes) & set(KILLED)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["interleaved", "block", "workers", "stream"])
def test_epochs_killed_many_times_go_on_with_every_sample_once(
    tmp_path: Path, python: str, kind: str
) -> None:
    codes = consume(tmp_path, kind, python=python, rng=random.Random(f"long {kind}"), num_kills=5)
    check(kind, consumed(tmp_path))
    assert set(codes) & set(KILLED)
