"""A loop of a program that goes on from a checkpoint and passes over batches by its own count."""

from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.data import DataLoader

from accelerate_sides import Side


def trained_after_resume(
    side: Side, folder: Path, *, num_batches: int, skip: int, num_epochs: int = 1
) -> list[int]:
    """Return the batches trained on after a resume from the third of an epoch, whose first ones are passed over."""
    numbers: Any = range(num_batches)
    with side.accelerator() as accelerator:
        _, loader = accelerator.prepare(nn.Linear(1, 1), DataLoader(numbers))
        for number, _ in enumerate(loader, start=1):
            if number == 3:
                accelerator.save_state(str(folder))
                break
    trained: list[int] = []
    with side.accelerator() as accelerator:
        model, loader = accelerator.prepare(nn.Linear(1, 1), DataLoader(numbers))
        accelerator.load_state(str(folder))
        for epoch in range(num_epochs):
            for step, batch in enumerate(loader):
                if epoch == 0 and step < skip:
                    continue
                accelerator.backward(model(batch.float().reshape(1, 1)).sum())
                trained.append(batch.item())
    return trained
