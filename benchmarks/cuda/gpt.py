"""A GPT written by hand, and the floating point operations of its training step counted by hand."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTSize:
    """The sizes of a GPT and of its batch; by default 354 million parameters.

    Attributes:
        layers: Blocks.
        width: Features of a token.
        heads: Of attention.
        vocabulary: Tokens that there are.
        length: Tokens of a sequence.
        sequences: Of a batch.
    """

    layers: int = 24
    width: int = 1024
    heads: int = 16
    vocabulary: int = 50304
    length: int = 1024
    sequences: int = 8

    @property
    def num_tokens(self) -> int:
        """The tokens of a batch."""
        return self.sequences * self.length

    @property
    def step_flops(self) -> int:
        """The operations of a step: three times the forward's, a multiplication with its addition being two.

        All scores of attention count, as in torch's counter and in most papers, though the causal mask drops half.
        """
        weights = self.layers * 12 * self.width**2 + self.vocabulary * self.width
        scores = self.layers * 2 * self.length * self.width
        return 3 * 2 * (weights + scores) * self.num_tokens

    def batch(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return random tokens and those that follow them, both (sequences, length)."""
        tokens = torch.randint(self.vocabulary, (self.sequences, self.length + 1), device=device)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


TINY = GPTSize(layers=2, width=64, heads=4, vocabulary=128, length=32, sequences=2)


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind a norm."""

    def __init__(self, size: GPTSize) -> None:
        super().__init__()
        self.num_heads = size.heads
        self.attention_norm, self.inner_norm = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.projections = nn.Linear(size.width, 3 * size.width, bias=False)
        self.mixed = nn.Linear(size.width, size.width, bias=False)
        self.inner = nn.Linear(size.width, 4 * size.width, bias=False)
        self.outer = nn.Linear(4 * size.width, size.width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map (sequences, length, width) to (sequences, length, width)."""
        split = self.projections(self.attention_norm(hidden)).unflatten(-1, (3, self.num_heads, -1))
        query, key, value = split.permute(2, 0, 3, 1, 4)
        attended = scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.mixed(attended.transpose(1, 2).flatten(2))
        return hidden + self.outer(gelu(self.inner(self.inner_norm(hidden))))


class GPT(nn.Module):
    """A decoder whose head is its embedding."""

    def __init__(self, size: GPTSize) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.places = nn.Embedding(size.length, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, following: Tensor) -> Tensor:
        """Return the mean loss of tokens and those that follow, both (sequences, length)."""
        hidden = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.norm(hidden))
        return cross_entropy(logits.flatten(0, 1).float(), following.flatten())
