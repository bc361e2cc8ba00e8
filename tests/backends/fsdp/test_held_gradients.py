"""Whole gradients that wait on their ranks for a backward that reduces them, and backwards that do not come."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import SGD

from backends.replicas import prepare_sgd
from drivetrain_backends import AccumulationError, FSDPBackend, Prepared
from sharded_stack import Stack, fsdp, loss_of, stack, weights


@contextmanager
def two_models() -> Iterator[tuple[FSDPBackend, Prepared, Prepared]]:
    """Two models, each with an optimizer, in windows of two micro-batches."""
    backend = fsdp(accumulation=2)
    models = stack(0), stack(1)
    first, second = backend.prepare(models, [SGD(model.parameters(), lr=0.1) for model in models], [])
    yield backend, first, second
    backend.close()


def step_without_a_closing_backward() -> str:
    with two_models() as (backend, first, second):
        backend.window.begin()
        with first.no_sync(), second.no_sync():
            backend.backward(loss_of(first.model, dist.get_rank()))
            backend.backward(loss_of(second.model, dist.get_rank()))
        backend.window.begin()
        backend.backward(loss_of(first.model, dist.get_rank()))
        first.optimizers[0].step()
        try:
            second.optimizers[0].step()
        except AccumulationError as error:
            return str(error)
        return "stepped"


def test_a_model_that_the_closing_micro_batch_does_not_train_is_named(run_ranks) -> None:
    for said in run_ranks(step_without_a_closing_backward):
        assert "the window closed without a backward of Stack: its gradients so far are held back" in said


def weights_after_a_dropped_window() -> dict[str, Tensor]:
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
        for closes in (False, True):
            backend.window.begin(is_last=closes)
            if closes:
                backend.backward(loss_of(second.model, dist.get_rank()))
                continue
            with first.no_sync(), second.no_sync():
                backend.backward(loss_of(second.model, dist.get_rank()))
        second.optimizers[0].step()
        return weights(second)


def test_what_a_dropped_window_held_is_not_in_the_next(run_ranks) -> None:
    plain = stack(1)
    optimizer = SGD(plain.parameters(), lr=0.1)
    for rank in range(2):
        (loss_of(plain, rank) / 2).backward()
    optimizer.step()
    for found in run_ranks(weights_after_a_dropped_window):
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(found[name], value)


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


def backward_after_one_that_failed() -> list[str]:
    backend, _model, prepared = prepare_sgd(fsdp(), FailingStack())
    said: list[str] = []
    for _ in range(2):
        backend.window.begin()
        try:
            prepared.backward(loss_of(prepared.model, 0))
        except (MemoryError, AccumulationError) as error:
            said.append(str(error))
        prepared.optimizers[0].zero_grad()
    backend.close()
    return said


def test_a_backward_that_failed_half_way_is_told_of_at_the_next(run_ranks) -> None:
    for first, second in run_ranks(backward_after_one_that_failed):
        assert first == "out of memory"
        assert "an earlier backward of FailingStack ended in an error half way" in second
