"""A training run for elastic launches: it logs each micro-batch that it reads, with its loss, and saves as it goes.

python elastic_training.py PROJECT LOG MEANT_FOR PAUSE_SECONDS
"""

import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from drivetrain import Accelerator
from drivetrain_checkpoint import NoCheckpointError

SAMPLES, MICRO_BATCH, MICRO_BATCHES, EPOCHS = 96, 2, 2, 25


class Sines(Dataset[tuple[torch.Tensor, int]]):
    """Sample i is filled with its number's sine."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.sin(torch.arange(8) * (index + 1.0)), index


def main(project: Path, log: Path, meant_for: int, pause_seconds: float) -> None:
    """Train for some epochs, from the newest checkpoint on."""
    sections = {
        "checkpoint": {"save_every_steps": 3, "keep_last": 3, "stall_seconds": 20},
        "run": {"accumulation_world_size": meant_for, "show_plan": False},
    }
    accelerator = Accelerator(
        cpu=True, project_dir=project, seed=5, gradient_accumulation_steps=MICRO_BATCHES, sections=sections
    )
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(Sines(), batch_size=MICRO_BATCH, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    step, began, port = (
        0,
        time.time(),
        os.environ["MASTER_PORT"],
    )  # the ranks of a round share a store of their own
    with suppress(NoCheckpointError):
        step = accelerator.load_state()
    print(f"begins at step {step} with {accelerator.num_processes} processes", flush=True)
    per_epoch = SAMPLES // (MICRO_BATCH * MICRO_BATCHES * meant_for)
    with accelerator, log.with_suffix(f".{accelerator.process_index}.{began}").open("a", buffering=1) as file:
        while step < EPOCHS * per_epoch:
            for items, indices in loader:
                with accelerator.accumulate(model):
                    loss = (model(items) - items.sum(-1, keepdim=True)).square().mean()
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                said = {"began": began, "round": port, "world": accelerator.num_processes, "step": step}
                said |= {"loss": loss.item(), "samples": indices.tolist()}
                file.write(json.dumps(said) + "\n")
                if accelerator.sync_gradients:
                    step += 1
                    time.sleep(pause_seconds)
                accelerator.save_if_due()
    print("trained", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
