"""A language model of blocks, whose sequences, and words of whose head, ranks can divide."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sequence_layer import WIDTH, Block

NUM_WORDS = 11


class Words(nn.Module):
    """Words, blocks, a norm and a head; returns the loss of the next word if it is asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(NUM_WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(None) for _ in range(2))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, NUM_WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (items, positions) to logits (items, positions, NUM_WORDS)."""
        states = self.words(tokens)
        for block in self.blocks:
            states = block(states)
        return self.head(self.norm(states))


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the mean loss of the next words."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def tokens_of(step: int) -> Tensor:
    """Return the words of a step, of shape (2, 7)."""
    return torch.randint(NUM_WORDS, (2, 7), generator=torch.Generator().manual_seed(step))
