"""Small models to plan for: a Llama by its configuration, and factories that a command can name."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain_plan.model.source import ConfigSource

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128,
    "max_position_embeddings": 4096, "use_cache": False,
}  # fmt: skip


class Perceptron(nn.Module):
    """Two blocks of two layers each."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))
            for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs, of the shape of the inputs."""
        for layer in self.layers:
            x = x + layer(x)
        return x


class ByValues(Perceptron):
    """A model whose forward asks for a value."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs, or the inputs if their sum is above 0."""
        found = super().forward(x)
        return found if found.sum() > 0 else x + found


def by_values() -> tuple[nn.Module, Callable[[int, int], Mapping[str, Any]]]:
    """Return a model that has no program without data, and its inputs."""
    return ByValues(64), lambda batch, _: {"x": torch.zeros(batch, 64)}


def perceptron() -> tuple[nn.Module, Callable[[int, int], Mapping[str, Any]]]:
    """Return the model, of 33 thousand parameters, and its inputs."""
    return Perceptron(64), lambda batch, _: {"x": torch.zeros(batch, 64)}


def llama_source(folder: Path, **changed: object) -> ConfigSource:
    """Write the configuration into a folder, and return the source that reads it."""
    (folder / "config.json").write_text(json.dumps({**LLAMA, **changed}))
    return ConfigSource(folder)
