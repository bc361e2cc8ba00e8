"""The models and batches that benchmarks/parallel.py divides, and the step of a plain loop."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import AdamW
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

ITEMS, TOKENS = 4, 128
Step = Callable[[], float]


def llama(*, num_layers: int = 8, width: int = 256, vocabulary: int = 8192) -> LlamaForCausalLM:
    """A Llama, of 10.5 million parameters in 8 layers."""
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=num_layers,
        num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=4 * TOKENS, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def make() -> tuple[LlamaForCausalLM, Tensor]:
    """The model and its one batch, the same on all ranks."""
    torch.manual_seed(0)
    model = llama()
    return model, torch.randint(model.config.vocab_size, (ITEMS, TOKENS))


def mesh() -> DeviceMesh:
    """The two ranks."""
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tensor",))


def loop(
    model: nn.Module, x: Tensor, groups: Iterable[Any] = (), finish: Callable[[], object] | None = None
) -> Step:
    """PyTorch's own step, of an optimizer of these groups; `finish` is called between backward and the step."""
    optimizer = AdamW(groups or model.parameters())

    def step() -> float:
        loss = model(x, labels=x).loss
        loss.backward()
        if finish is not None:
            finish()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def make_long() -> tuple[LlamaForCausalLM, Tensor]:
    """A model of few words, and a batch of two long sequences, the same on all ranks."""
    torch.manual_seed(0)
    model = llama(vocabulary=256)
    return model, torch.randint(model.config.vocab_size, (2, 4 * TOKENS))


class Experts(nn.Module):
    """Perceptrons, of which each token chooses some."""

    def __init__(self, num_experts: int, width: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.up = nn.Parameter(torch.randn(num_experts, width, 2 * width) / width**0.5)
        self.down = nn.Parameter(torch.randn(num_experts, 2 * width, width) / (2 * width) ** 0.5)

    def forward(self, tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sums, of shape (tokens, width)."""
        found = torch.zeros_like(tokens)
        for expert in range(self.num_experts):
            row, choice = torch.where(index == expert)
            output = F.gelu(tokens[row] @ self.up[expert]) @ self.down[expert]
            found = found.index_add(0, row, output * weights[row, choice, None])
        return found


class RoutedBlock(nn.Module):
    """A mixture of experts with its router, beside a perceptron that all tokens go through."""

    def __init__(self, width: int, num_experts: int) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(width), nn.Linear(width, num_experts)
        self.shared = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.experts = Experts(num_experts, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the next hidden states, of shape (batch, positions, width)."""
        tokens = self.norm(x).flatten(0, -2)
        weights, index = self.router(tokens).softmax(-1).topk(2)
        return x + self.shared(x) + self.experts(tokens, index, weights).view(x.shape)


class Routed(nn.Module):
    """A language model of such blocks, with its loss."""

    def __init__(
        self, *, width: int = 256, num_blocks: int = 4, num_experts: int = 8, vocabulary: int = 1024
    ) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)
        self.blocks = nn.ModuleList(RoutedBlock(width, num_experts) for _ in range(num_blocks))

    def forward(self, tokens: Tensor, labels: Tensor) -> CausalLMOutputWithPast:
        """Return the mean loss of predicting each next one of the labels, of shape (batch, positions)."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        loss = F.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutputWithPast(loss=loss)


def make_routed() -> tuple[Routed, Tensor]:
    """The model of 10 million parameters, and the batch of this rank."""
    torch.manual_seed(0)
    model = Routed()
    batches = torch.randint(model.embed.num_embeddings, (dist.get_world_size(), ITEMS, TOKENS))
    return model, batches[dist.get_rank()]
