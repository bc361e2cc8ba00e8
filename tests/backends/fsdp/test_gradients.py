"""Sharded gradients: their norm, and whole ones that wait on their ranks for a backward that reduces them."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.optim import SGD

from drivetrain_backends import AccumulationError, FSDPBackend, Prepared
from drivetrain_backends.fsdp.gradients import global_norm
from drivetrain_backends.gradients.multi_tensor import scale_to_norm
from drivetrain_backends.state_dict.dtensor import local, own_part, whole_of
from plain_loop.backends import context, fsdp, plain_step, prepare_sgd, weights
from plain_loop.stack import Stack, loss_of, stack


@contextmanager
def two_models() -> Iterator[tuple[FSDPBackend, Prepared, Prepared]]:
    """Two models, each with an optimizer, in windows of two micro-batches."""
    backend = fsdp(accumulation=2)
    models = stack(0), stack(1)
    first, second = backend.prepare(models, [SGD(model.parameters(), lr=0.1) for model in models], [])
    yield backend, first, second
    backend.close()


@pytest.mark.ranks(2)
def test_a_model_that_the_closing_micro_batch_does_not_train_is_named() -> None:
    with two_models() as (backend, first, second):
        backend.window.begin()
        with first.no_sync(), second.no_sync():
            backend.backward(loss_of(first.model, dist.get_rank()))
            backend.backward(loss_of(second.model, dist.get_rank()))
        backend.window.begin()
        backend.backward(loss_of(first.model, dist.get_rank()))
        first.optimizers[0].step()
        with pytest.raises(
            AccumulationError, match="closed without a backward of Stack: its gradients so far"
        ):
            second.optimizers[0].step()


@pytest.mark.ranks(2)
def test_what_a_dropped_window_held_is_not_in_the_next() -> None:
    with two_models() as (backend, first, second):
        backend.window.begin()
        with first.no_sync(), second.no_sync():
            backend.backward(loss_of(first.model, dist.get_rank()))
            backend.backward(50 * loss_of(second.model, dist.get_rank()))
        backend.window.begin()
        backend.backward(loss_of(first.model, dist.get_rank()))
        first.optimizers[0].step()
        for prepared in (first, second):
            prepared.optimizers[0].zero_grad()
        backend.window.begin(is_last=False)
        with first.no_sync(), second.no_sync():
            backend.backward(loss_of(second.model, dist.get_rank()))
        backend.window.begin(is_last=True)
        backend.backward(loss_of(second.model, dist.get_rank()))
        second.optimizers[0].step()
        plain = stack(1)
        plain_step(SGD(plain.parameters(), lr=0.1), (loss_of(plain, 0) + loss_of(plain, 1)) / 2)
        torch.testing.assert_close(weights(second), dict(plain.state_dict()))


class Failing(torch.autograd.Function):
    """Does nothing, and runs out of memory in backward."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        raise MemoryError("out of memory")


class FailingStack(Stack):
    """A stack whose backward fails between its blocks."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.blocks[0](self.embedding(tokens) + self.shift)
        return self.head(self.blocks[1](Failing.apply(x)))


@pytest.mark.ranks(2)
def test_a_backward_that_failed_half_way_is_told_of_at_the_next() -> None:
    _, _, prepared = prepare_sgd(fsdp(), FailingStack())
    with pytest.raises(MemoryError, match="out of memory"):
        prepared.backward(loss_of(prepared.model, 0))
    prepared.optimizers[0].zero_grad()
    with pytest.raises(AccumulationError, match="an earlier backward of FailingStack ended in an error half"):
        prepared.backward(loss_of(prepared.model, 0))


def tensors() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=generator).double() for shape in ((5, 3), (1, 2), (4,), (2, 2))]


def divided() -> list[torch.Tensor]:
    """The same tensors over a line of ranks, a grid, a row of replicas, and whole."""
    line = init_device_mesh("cpu", (2,))
    grid = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "shard"))
    replicas = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "shard"))
    first, second, third, fourth = tensors()
    return [
        distribute_tensor(first, line, [Shard(0)]),
        distribute_tensor(second, grid, [Replicate(), Shard(0)]),
        distribute_tensor(third, replicas, [Replicate(), Shard(0)]),
        fourth,
    ]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, float("inf")])
def test_the_norm_over_several_meshes_is_that_of_the_whole(norm_type: float) -> None:
    expected = torch.linalg.vector_norm(torch.cat([t.flatten() for t in tensors()]), norm_type).item()
    with context() as where:
        gradients = divided()
        total = global_norm(gradients, norm_type, where.device)
        assert total.item() == pytest.approx(expected, rel=1e-12)
        scale_to_norm(list(map(local, gradients)), total, 0.1)
        assert global_norm(gradients, norm_type, where.device).item() == pytest.approx(0.1, rel=1e-5)


@pytest.mark.ranks(2)
def test_a_ranks_part_is_the_one_that_torch_gives_it() -> None:
    with context() as where:
        for whole, part in zip(tensors(), divided(), strict=True):
            if isinstance(part, DTensor):
                assert torch.equal(own_part(whole, part), local(part))
                assert torch.equal(whole_of(part, where.device), whole)


def test_no_gradients_have_no_norm() -> None:
    assert global_norm([], 2.0, torch.device("cpu")).item() == 0
