"""A layer of blocks for the contract of backends, whose sequences ranks can divide."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel.models import Routed

WIDTH = 4


class Block(nn.Module):
    """Causal attention of two heads, and a perceptron; maps (items, positions, WIDTH) to the same."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.num_heads = 2
        self.heads = nn.Linear(WIDTH, 3 * WIDTH, dtype=dtype)
        self.mixed = nn.Linear(WIDTH, WIDTH, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Add attention."""
        heads = self.heads(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = heads
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return x + torch.tanh(self.mixed(mixed.transpose(1, 2).flatten(2))) / 4


class SequenceLayer(nn.Module):
    """A layer from features to features, which it takes for a sequence."""

    def __init__(self, num_inputs: int, num_outputs: int, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, dtype=dtype))
        self.blocks = nn.ModuleList(Block(dtype) for _ in range(2))
        self.output = nn.Linear(num_inputs * WIDTH, num_outputs, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Map (items, num_inputs) to (items, num_outputs)."""
        states = x.unsqueeze(-1) * self.weight
        for block in self.blocks:
            states = block(states)
        return (
            self.output(torch.tanh(states).flatten(1)) / 4
        )  # small, so that rounding does not grow by training


class RoutedBlock(Block):
    """A block with experts, each token of which chooses two of five."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        super().__init__(dtype)
        self.routed = Routed(width=WIDTH).to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Add attention, and a little of what the experts return."""
        states = super().forward(x)
        return states + (self.routed(states) - states) / 4


class RoutedLayer(SequenceLayer):
    """A layer whose blocks hold experts."""

    def __init__(self, num_inputs: int, num_outputs: int, dtype: torch.dtype | None = None) -> None:
        super().__init__(num_inputs, num_outputs, dtype)
        self.blocks = nn.ModuleList(RoutedBlock(dtype) for _ in range(2))
