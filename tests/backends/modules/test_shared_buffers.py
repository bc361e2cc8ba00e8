"""Buffers that change in training follow rank 0's, as under DDP."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from plain_loop.backends import fsdp, plain_step, prepare_sgd, take_step


class Normalised(nn.Module):
    """A batch normalisation, and an average that is replaced at each forward; maps (items, 4) to (items, 2)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 2)
        self.register_buffer("average", torch.zeros(4))
        self.register_buffer("mask", torch.ones(4, dtype=torch.bool))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.average = 0.9 * self.average + 0.1 * x.mean(0)
        return self.last(self.norm(self.first(x)) * self.mask + self.average)


def batch(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(6, 4, generator=generator) * (1 + rank)


def by_ddp() -> list[Tensor]:
    """The outputs of each step's training and evaluation."""
    replica = DistributedDataParallel(model := Normalised())
    optimizer = SGD(model.parameters(), lr=0.1)
    outputs: list[Tensor] = []
    for step in range(4):
        output = replica.train()(batch(step, dist.get_rank()))
        plain_step(optimizer, output.square().mean())
        outputs += [output.detach(), replica.eval()(batch(0, 0)).detach()]
    return outputs


def by_fsdp(**settings: object) -> list[Tensor]:
    backend, _, prepared = prepare_sgd(fsdp(**settings), Normalised())
    outputs: list[Tensor] = []
    for step in range(4):
        output = prepared.model.train()(batch(step, dist.get_rank()))
        take_step(prepared, output.square().mean())
        with torch.no_grad():
            outputs += [output.detach(), prepared.model.eval()(batch(0, 0))]
    backend.close()
    return outputs


@pytest.mark.ranks(2)
def test_batch_norm_trains_and_evaluates_as_under_ddp() -> None:
    torch.testing.assert_close(by_fsdp(), by_ddp())
    last: list[list[Tensor]] = [[], []]
    dist.all_gather_object(last, by_fsdp(broadcast_buffers=False)[-1:])
    assert not torch.equal(*map(torch.stack, last))  # left alone, statistics are each rank's own
