"""Small modules whose sizes allow a division that their computation may not."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 16


class Perceptron(nn.Module):
    """Two layers, with what stands between them."""

    def __init__(self, between: nn.Module | None = None, hidden: int = 32) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)
        self.between = between or nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.between(self.up(x)))


class GatedPerceptron(nn.Module):
    """A gate and its values in one layer, in halves or element by element."""

    def __init__(self, *, interleaved: bool = False) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Linear(WIDTH, 64), nn.Linear(32, WIDTH)
        self.interleaved = interleaved

    def forward(self, x: Tensor) -> Tensor:
        if self.interleaved:
            gate, up = self.gate_up(x).unflatten(-1, (-1, 2)).unbind(-1)
        else:
            gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Attention(nn.Module):
    """Attention of four heads, counted by an attribute or by their size; `biases` are added to the scores."""

    def __init__(
        self,
        *,
        counts: bool = True,
        norm: nn.Module | None = None,
        is_scaled: bool = False,
        biases: Tensor | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.num_heads = 4
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.output = nn.Linear(WIDTH, WIDTH)
        self.norm = norm or nn.Identity()
        self.scale = nn.Parameter(torch.ones(())) if is_scaled else None
        self.counts, self.dropout = counts, dropout
        self.register_buffer("biases", biases)

    def split(self, x: Tensor) -> Tensor:
        sizes = (self.num_heads, -1) if self.counts else (-1, 4)
        return x.unflatten(-1, sizes).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        query = self.norm(self.split(self.query(x)))
        if self.scale is not None:
            query = query * self.scale
        key, value = self.split(self.key(x)), self.split(self.value(x))
        biases = None
        if self.biases is not None:
            places = torch.arange(x.shape[1], dtype=x.dtype)
            biases = self.biases[: self.num_heads].to(x.dtype)[:, None, None] * places
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, biases, dropout)
        return self.output(mixed.transpose(1, 2).flatten(2))


class MaskedAttention(Attention):
    """Attention that wants a mask, which may be None."""

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        return super().forward(x)


class ConditionedAttention(Attention):
    """Attention that does not run on one tensor alone."""

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        return super().forward(x * condition.sum())


class Conditioned(nn.Module):
    """Calls a module with a second argument."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, torch.ones(1, dtype=x.dtype))


class GroupedAttention(nn.Module):
    """Four queries and two keys and values in one layer, of sizes that it computes from its numbers of heads."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = 4, 2, 4
        self.qkv, self.output = nn.Linear(WIDTH, 32), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        sizes = [self.num_heads * self.head_dim, *[self.num_kv_heads * self.head_dim] * 2]
        query, key, value = (
            one.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for one in self.qkv(x).split(sizes, -1)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, enable_gqa=True)
        return self.output(mixed.transpose(1, 2).flatten(2))


class CountedByProperty(Attention):
    """Attention whose number of heads follows from the layer's outputs."""

    num_heads: Any = property(lambda self: self.query.out_features // 4, lambda self, value: None)


class Block(nn.Module):
    """Fused attention and a perceptron in one module, with dropout inside both and after the perceptron."""

    def __init__(self, between: nn.Module | None = None, *, dropout: float = 0.0, num_heads: int = 4) -> None:
        super().__init__()
        self.num_heads, self.dropout = num_heads, dropout
        self.norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.attended = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.between = between or nn.GELU()
        self.inside, self.outside = nn.Dropout(dropout), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            self.qkv(self.norm(x)).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        )
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout)
        x = x + self.attended(mixed.transpose(1, 2).flatten(2))
        return x + self.outside(self.down(self.inside(self.between(self.up(self.mlp_norm(x))))))


class Experts(nn.Module):
    """Perceptrons that are stacked, of which each token chooses some."""

    def __init__(self, num_experts: int = 5, width: int = WIDTH) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.up = nn.Parameter(torch.randn(num_experts, width, 2 * width) * width**-0.5)
        self.bias = nn.Parameter(torch.randn(num_experts, 2 * width))
        self.down = nn.Parameter(torch.randn(num_experts, 2 * width, width) * (2 * width) ** -0.5)

    def forward(self, tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        found = torch.zeros_like(tokens)
        for expert in range(self.num_experts):
            row, choice = torch.where(index == expert)
            output = F.gelu(tokens[row] @ self.up[expert] + self.bias[expert]) @ self.down[expert]
            found = found.index_add(0, row, output * weights[row, choice, None])
        return found


class Routed(nn.Module):
    """A block that chooses two experts for each token."""

    def __init__(self, experts: nn.Module | None = None, num_experts: int = 5, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(width), nn.Linear(width, num_experts)
        self.experts = experts or Experts(num_experts, width)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.norm(x).flatten(0, -2)
        weights, index = self.router(rows).softmax(-1).topk(2)
        return x + self.experts(rows, index, weights).view(x.shape)


# How a model may go through three blocks, other than from the first to the last.
ROUTES: Mapping[str, Callable[..., Tensor]] = {
    "adds what went into a block": lambda x, a, b, c: (x := (x := x + a(x)) + b(x)) + c(x),
    "uses a middle state": lambda x, a, b, c: c(b(x := a(x))) + x,
    "returns all states": lambda x, a, b, c: torch.stack([x, x := a(x), x := b(x), c(x)]).sum(0),
    "leaves early": lambda x, a, b, c: b(a(x)),
    "skips the first": lambda x, a, b, c: c(b(x)),
    "skips the middle": lambda x, a, b, c: c(a(x)),
    "runs one twice": lambda x, a, b, c: c(b(b(a(x)))),
    "in another order": lambda x, a, b, c: a(c(b(x))),
    "goes around": lambda x, a, b, c: c(b(a(x))) + x,
    "moves positions between": lambda x, a, b, c: c(b(a(x).roll(1, 1))),
    "drops a sequence between": lambda x, a, b, c: torch.cat([c(b(a(x)[:1])), x[1:]]),
    "scales between": lambda x, a, b, c: c(b(a(x) * 0.5)),
}
