"""A hundred training loops that do not leak; `python clean_runs.py FIRST END` watches some of them."""

import itertools
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain_memory import LeakDetector

Build = Callable[[], tuple[nn.Module, torch.Tensor]]


def mlp() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 1)), torch.randn(8, 16)


def convolutions() -> tuple[nn.Module, torch.Tensor]:
    layers = [
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 1),
    ]
    return nn.Sequential(*layers), torch.randn(4, 3, 16, 16)


def encoder() -> tuple[nn.Module, torch.Tensor]:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.randn(4, 12, 16)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(8, 16, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.cells(x)[0]


def recurrent() -> tuple[nn.Module, torch.Tensor]:
    return Recurrent(), torch.randn(4, 10, 8)


class Language(nn.Module):
    """A small model of transformers, from its configuration."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

        config = (
            GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=64, n_positions=32)
            if kind == "gpt2"
            else LlamaConfig(
                num_hidden_layers=1,
                num_attention_heads=2,
                num_key_value_heads=1,
                hidden_size=16,
                intermediate_size=32,
                vocab_size=64,
            )
        )
        self.model = AutoModelForCausalLM.from_config(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=(x.abs() * 20).long() % 64).logits


def gpt2() -> tuple[nn.Module, torch.Tensor]:
    return Language("gpt2"), torch.randn(2, 12)


def llama() -> tuple[nn.Module, torch.Tensor]:
    return Language("llama"), torch.randn(2, 12)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=1e-3),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-3),
}
LOOPS = ("plain", "loader", "history", "lengths", "scheduler")
MODELS: tuple[Build, ...] = (mlp, convolutions, encoder, recurrent, gpt2, llama)
_ALL = tuple(itertools.product(range(len(MODELS)), OPTIMIZERS, LOOPS))
_MIXED = [_ALL[i * 37 % len(_ALL)] for i in range(100)]  # a hundred of 120
_CHEAP_FIRST = sorted(
    _MIXED, key=lambda run: MODELS[run[0]] in (gpt2, llama)
)  # importing transformers takes seconds
RUNS = (*_CHEAP_FIRST[:9], _CHEAP_FIRST[-1], *_CHEAP_FIRST[9:-1])


def steps(build: Build, optimizer_name: str, loop: str) -> Iterator[None]:
    torch.manual_seed(0)
    model, sample = build()
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    history: list[float] = []
    loader = DataLoader(TensorDataset(torch.cat([sample] * 4)), batch_size=len(sample), shuffle=True)
    batches = itertools.chain.from_iterable(iter(loader) for _ in itertools.count())
    for number in itertools.count():
        batch = next(batches)[0] if loop == "loader" else torch.randn_like(sample)
        if loop == "lengths" and batch.dim() == 3:
            batch = batch[:, : 4 + number % 6]
        loss = model(batch).float().square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if loop == "history":
            history.append(loss.item())
        if loop == "scheduler":
            scheduler.step()
        yield


def watch(model: int, optimizer_name: str, loop: str) -> dict[str, Any]:
    detector = LeakDetector()
    run = steps(MODELS[model], optimizer_name, loop)
    for _ in range(70):
        next(run)
        detector.step()
    detector.close()
    found = [] if detector.report is None else list(map(str, detector.report.leaks))
    return {
        "run": [MODELS[model].__name__, optimizer_name, loop],
        "leaks": found,
        "investigated": detector.report is not None,
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    first, end = map(int, sys.argv[1:])
    print(json.dumps([watch(*one) for one in RUNS[first:end]]))
