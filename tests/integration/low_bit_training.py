"""Low-bit optimizers of torchao and bitsandbytes, and a loop that trains, saves and resumes with them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain import Accelerator
from plain_loop.accelerated import accelerator_of, take_steps, weights_of

Make = Callable[[Any], Optimizer]


def _torchao(name: str, **options: Any) -> Make:
    def make(parameters: Any) -> Optimizer:
        import torchao.optim

        return getattr(torchao.optim, name)(parameters, lr=0.01, **options)

    return make


def _bitsandbytes(name: str) -> Make:
    def make(parameters: Any) -> Optimizer:
        import bitsandbytes.optim

        return getattr(bitsandbytes.optim, name)(parameters, lr=0.01)

    return make


TORCHAO = {
    "torchao AdamW8bit": _torchao("AdamW8bit"),
    "torchao AdamW4bit": _torchao("AdamW4bit"),
    "torchao AdamWFp8": _torchao("AdamWFp8"),
    "torchao stochastic rounding": _torchao("AdamW8bit", bf16_stochastic_round=True),
}
BITSANDBYTES = {
    "bitsandbytes AdamW8bit": _bitsandbytes("AdamW8bit"),
    "bitsandbytes Adam8bit": _bitsandbytes("Adam8bit"),
    "bitsandbytes AdamW32bit": _bitsandbytes("AdamW32bit"),
    "bitsandbytes PagedAdamW8bit": _bitsandbytes("PagedAdamW8bit"),
}
ALL = {**TORCHAO, **BITSANDBYTES, "torch AdamW": lambda p: torch.optim.AdamW(p, lr=0.01)}


def net(rows: int = 128, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A model of two matrices that low-bit optimizers quantise, if `rows` allows, and smaller tensors."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, rows), nn.Tanh(), nn.Linear(rows, 64), nn.Tanh(), nn.Linear(64, 3)).to(
        dtype
    )


@contextmanager
def training(
    folder: Path | str | None,
    name: str,
    *,
    rows: int = 128,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Iterator[tuple[Accelerator, nn.Module, Any]]:
    """An Accelerator with a prepared model and optimizer; steps run uncompiled, since compiling takes minutes."""
    with (
        torch.compiler.set_stance("force_eager"),
        accelerator_of(project_dir=folder, **options) as accelerator,
    ):
        model = net(rows, dtype)
        model, optimizer = accelerator.prepare(model, ALL[name](model.parameters()))
        yield accelerator, model, optimizer


def steps(accelerator: Accelerator, model: nn.Module, optimizer: Any, start: int, stop: int) -> None:
    """Train some steps, with clipped gradients; a window's micro-batches are the rows of one batch."""
    size, dtype = accelerator.gradient_accumulation_steps, next(model.parameters()).dtype

    def loss_of(number: int) -> Tensor:
        batch = torch.randn(8, 64, generator=torch.Generator().manual_seed(number // size))
        return model(batch.chunk(size)[number % size].to(accelerator.device, dtype)).float().square().mean()

    take_steps(accelerator, model, optimizer, loss_of, range(start * size, stop * size), clip=0.5)


def run(folder: Path | str, name: str, start: int, stop: int, **options: Any) -> list[float]:
    """Train from a step, resumed if it is not the first, to another, and save; the weights."""
    with training(folder, name, **options) as (accelerator, model, optimizer):
        if start:
            assert accelerator.load_state() == start
        steps(accelerator, model, optimizer, start, stop)
        accelerator.save_state()
        return weights(accelerator, model)


def weights(accelerator: Accelerator, model: nn.Module) -> list[float]:
    """All weights in one list, on every rank."""
    return torch.cat([value.flatten() for value in weights_of(accelerator, model).values()]).tolist()


def forms(optimizer: Any) -> list[str]:
    """The classes of the states of an optimizer's parameters on this rank: one for each first moment."""
    found = [state.get("exp_avg", state.get("state1")) for state in optimizer.state.values()]
    return [type(value.to_local() if hasattr(value, "to_local") else value).__name__ for value in found]


def values(optimizer: Any) -> list[Tensor]:
    """The first and second moments in floating point, as this rank holds them."""
    found: list[Tensor] = []
    for state in optimizer.state.values():
        for key in ("exp_avg", "exp_avg_sq"):
            value = state[key].to_local() if hasattr(state[key], "to_local") else state[key]
            found.append(value.clone() if type(value) is Tensor else value.dequantize())
    return found
