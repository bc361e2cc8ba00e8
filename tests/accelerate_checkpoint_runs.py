"""One small run that is saved and loaded, in the words of both the interface and the real Accelerate."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader


class Counter:
    def __init__(self, number: int = 0) -> None:
        self.number = number

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.number = state["number"]


class Run(NamedTuple):
    accelerator: Any
    models: list[nn.Module]
    optimizers: list[Any]
    scheduler: Any
    loader: Any
    counter: Counter

    def train(self, number: int, *, loader: Any = None) -> list[list[int]]:
        """Train on some batches, and return what they held."""
        seen: list[list[int]] = []
        for batch in loader or self.loader:
            with self.accelerator.accumulate(*self.models):
                features = batch.float().reshape(-1, 1) / 10
                loss = sum(model(features).square().mean() for model in self.models)
                self.accelerator.backward(loss)
                for optimizer in self.optimizers:
                    optimizer.step()
                self.scheduler.step()
                for optimizer in self.optimizers:
                    optimizer.zero_grad()
            seen.append(batch.tolist())
            self.counter.number += 1
            if len(seen) == number:
                break
        return seen

    def values(self) -> dict[str, Any]:
        """Return all that a checkpoint holds, as plain numbers."""
        weights = [p.detach().clone() for model in self.models for p in model.parameters()]
        moments = [
            value.clone()
            for optimizer in self.optimizers
            for state in optimizer.state_dict()["state"].values()
            for value in state.values()
            if isinstance(value, torch.Tensor)
        ]
        return {
            "weights": torch.cat([each.flatten() for each in weights]).tolist(),
            "moments": torch.cat([each.flatten() for each in moments]).tolist() if moments else [],
            "rate": self.scheduler.get_last_lr(),
            "number": self.counter.number,
        }


@contextmanager
def run_of(
    accelerator_class: Any, *, seed: int = 0, size: int = 24, ends: bool = True, **options: Any
) -> Generator[Run]:
    """Prepare a run, and forget what Accelerators share afterwards.

    With `ends=False`, the real one's end of training does not leave a process group that others need.
    """
    torch.manual_seed(seed)
    accelerator = accelerator_class(cpu=True, **options)
    models: list[nn.Module] = [nn.Sequential(nn.Linear(1, 3), nn.Linear(3, 1)), nn.Linear(1, 1)]
    optimizers: list[Any] = [
        torch.optim.AdamW(models[0].parameters(), lr=0.1),
        torch.optim.SGD(models[1].parameters(), lr=0.1, momentum=0.9),
    ]
    scheduler = torch.optim.lr_scheduler.StepLR(optimizers[0], step_size=2)
    loader = DataLoader(range(size), batch_size=2, shuffle=True)  # pyright: ignore[reportArgumentType]
    *prepared, scheduler, loader = accelerator.prepare(*models, *optimizers, scheduler, loader)
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    try:
        yield Run(accelerator, prepared[:2], prepared[2:], scheduler, loader, counter)
    finally:
        state, gradients = accelerator.state, accelerator.gradient_state
        if ends:
            accelerator.end_training()
        type(accelerator.gradient_state)._reset_state()
        type(state)._reset_state(reset_partial_state=True)
        type(gradients)._reset_state()  # a run that ends within an epoch leaves its loader there
