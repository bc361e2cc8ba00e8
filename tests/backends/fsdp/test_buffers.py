"""Buffers that change in training follow rank 0's, as under DDP."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from backends.replicas import plain_step, prepare_sgd, step_and_clear
from sharded_stack import fsdp


class Normalised(nn.Module):
    """A batch normalisation, and an average that is replaced at each forward; maps (items, 4) to (items, 2)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 2)
        self.register_buffer("average", torch.zeros(4))
        self.register_buffer("mask", torch.ones(4, dtype=torch.bool))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.average = 0.9 * self.average + 0.1 * x.mean(0)
        return self.last(self.norm(self.first(x)) * self.mask + self.average)


def model_of_seed() -> Normalised:
    torch.manual_seed(3)
    return Normalised()


def batch(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(6, 4, generator=generator) * (1 + rank)


def by_ddp(rank: int) -> list[Tensor]:
    model = model_of_seed()
    replica = DistributedDataParallel(model)
    optimizer = SGD(model.parameters(), lr=0.1)
    outputs: list[Tensor] = []
    for step in range(4):
        output = replica.train()(batch(step, rank))
        plain_step(optimizer, output.square().mean())
        outputs += [output.detach(), replica.eval()(batch(0, 0)).detach()]
    return outputs


def by_fsdp(rank: int, **settings: object) -> list[Tensor]:
    backend, _model, prepared = prepare_sgd(fsdp(**settings), model_of_seed())
    outputs: list[Tensor] = []
    for step in range(4):
        backend.window.begin()
        output = prepared.model.train()(batch(step, rank))
        prepared.backward(output.square().mean())
        step_and_clear(prepared)
        with torch.no_grad():
            outputs += [output.detach(), prepared.model.eval()(batch(0, 0))]
    backend.close()
    return outputs


def each_way() -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    rank = dist.get_rank()
    return by_ddp(rank), by_fsdp(rank), by_fsdp(rank, broadcast_buffers=False)


def test_batch_norm_trains_and_evaluates_as_under_ddp(run_ranks) -> None:
    found = run_ranks(each_way)
    for expected, sharded, _ in found:
        for want, have in zip(expected, sharded, strict=True):
            torch.testing.assert_close(have, want)
    assert not torch.equal(found[0][2][-1], found[1][2][-1])  # left alone, statistics are each rank's own
