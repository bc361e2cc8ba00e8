"""What FSDP would train wrongly, drop, or fail on with an error about storage is refused by name."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.func import functional_call
from torch.optim import SGD

from drivetrain_backends import AccumulationError, SecondDerivativeError, UnshardedParameterError
from plain_loop.backends import fsdp, prepare_sgd, step_and_clear, take_step
from plain_loop.stack import Stack, stack, tokens

pytestmark = pytest.mark.ranks(2)


@pytest.mark.parametrize(
    ("is_trained", "settings"),
    [(False, {}), (True, {}), (True, {"strategy": "no_shard"}), (True, {"prefetch": 1})],
)
def test_a_functional_call_with_other_parameters_is_refused(is_trained: bool, settings: dict) -> None:
    _, _, prepared = prepare_sgd(fsdp(**settings), stack(0), lr=0.0)
    if is_trained:
        take_step(prepared, prepared.model(tokens(0)).square().mean())
    other = {"blocks.1.linear.weight": torch.zeros(6, 6)}
    said = "a forward of Stack with another tensor in the place of blocks.1.linear.weight"
    with pytest.raises(UnshardedParameterError, match=said):
        functional_call(prepared.model, other, (tokens(0),))
    torch.testing.assert_close(prepared.model(tokens(0)), stack(0)(tokens(0)))  # the model is as it was


class Critic(Stack):
    """A stack that takes embedded inputs, (items, width); a gradient penalty asks for their gradient."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
def test_a_gradient_penalty_is_refused(strategy: str) -> None:
    _, _, prepared = prepare_sgd(fsdp(strategy=strategy), Critic())
    x = torch.ones(4, 6, requires_grad=True)
    output = prepared.model(x + dist.get_rank())
    torch.autograd.grad(output.sum(), x, retain_graph=True)  # one derivative is as ever
    with pytest.raises(SecondDerivativeError, match="a backward through Critic with create_graph=True"):
        torch.autograd.grad(output.sum(), x, create_graph=True)


class Direct(Stack):
    """A stack that runs a block past its call, as some of transformers' classes do."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block.forward(x)
        return self.head(x)


def test_a_block_that_is_run_past_its_call_is_refused_with_ways_out() -> None:
    _, _, prepared = prepare_sgd(fsdp(wrap=("Block",)), Direct())
    with pytest.raises(
        UnshardedParameterError, match="a forward of Direct used parameters of a block that is not gathered"
    ) as caught:
        prepared.model(tokens(0))
    assert "Blocks are Block: have the model call them" in str(caught.value)
    _, _, prepared = prepare_sgd(fsdp(min_num_params=10**6), Direct())
    assert prepared.model(tokens(0)).isfinite().all()


class Writing(nn.Module):
    """Two layers, of which the first writes into its weight in forward, once there is a way."""

    def __init__(self, way: Callable[[nn.Parameter], object] | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.way = nn.Linear(4, 4), nn.Linear(4, 1), way
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        if self.way is not None:
            with torch.no_grad():
                self.way(self.first.weight)
        return self.second(torch.tanh(self.first(x)))


def clamped(weight: nn.Parameter) -> None:
    weight.clamp_(-0.1, 0.1)


def clamped_through_data(weight: nn.Parameter) -> None:
    weight.data.clamp_(-0.1, 0.1)


def assigned(weight: nn.Parameter) -> None:
    weight.data = weight.data * 0.5


def copied(weight: nn.Parameter) -> None:
    weight.copy_(weight * 0.5)


def train(way: Callable[[nn.Parameter], object], model: Writing, prepared: Any, first: int) -> None:
    """Train 3 steps, with a forward that writes from step `first` on; at -1 in an evaluation before all steps."""
    if first < 0:
        model.way = way
        with torch.no_grad():
            prepared.model.eval()(torch.ones(2, 4))
        prepared.model.train()
        model.way = None
    for number in range(3):
        if number == first:
            model.way = way
        take_step(prepared, prepared.model(torch.ones(2, 4) + dist.get_rank()).square().mean())


@pytest.mark.parametrize("first", [-1, 0, 2])
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
@pytest.mark.parametrize("way", [clamped, clamped_through_data, assigned, copied])
@pytest.mark.default_cases("full_shard--1", "clamped-full_shard", "copied-shard_grad_op-2")
def test_a_forward_that_writes_into_a_weight_is_refused_by_name(
    way: Callable, strategy: str, first: int
) -> None:
    _, model, prepared = prepare_sgd(fsdp(strategy=strategy), Writing(None))
    with pytest.raises(UnshardedParameterError, match=r"^first\.weight of Writing: a forward"):
        train(way, model, prepared, first)
    assert prepared.optimizers[0].num_steps == max(0, first)


def test_no_state_is_read_after_a_write_that_was_dropped() -> None:
    _, _, prepared = prepare_sgd(fsdp(), Writing(clamped_through_data))
    with torch.no_grad():
        prepared.model(torch.ones(2, 4))
    with pytest.raises(UnshardedParameterError, match=r"first\.weight of Writing: a forward"):
        prepared.state_dict()
    prepared.state_dict()  # refused once


@pytest.mark.parametrize("in_forward", [True, False])
def test_a_step_between_a_forward_and_its_backward_is_refused(in_forward: bool) -> None:
    _, model, prepared = prepare_sgd(fsdp(), Writing(None))
    if in_forward:
        model.register_forward_hook(lambda *_: step_and_clear(prepared))
    first, second = (prepared.model(torch.ones(2, 4) * k + dist.get_rank()).sum() for k in (1, 2))
    if not in_forward:
        take_step(prepared, first)
    with pytest.raises(
        UnshardedParameterError, match="Writing was stepped between a forward and its backward"
    ):
        prepared.backward(second)


def test_losses_are_added_up_before_the_step() -> None:
    _, _, prepared = prepare_sgd(fsdp(), Writing(None))
    for _ in range(3):
        take_step(prepared, sum(prepared.model(torch.ones(2, 4) * k + dist.get_rank()).sum() for k in (1, 2)))
    assert prepared.optimizers[0].num_steps == 3


@pytest.mark.parametrize(
    ("way", "told"),
    [
        ("prepared", "Writing while backward\\(\\) runs, from a hook on a parameter"),
        ("own", "first.weight changed while backward\\(\\) ran: a hook steps there"),
        ("update", "first.weight of Writing: a forward, or a hook in backward, wrote into it"),
    ],
)
def test_a_step_in_a_hook_of_backward_is_refused(way: str, told: str) -> None:
    model = Writing(None)
    optimizers = [SGD(model.first.parameters(), lr=0.1), SGD(model.second.parameters(), lr=0.1)]
    (prepared,) = fsdp().prepare([model], optimizers, [])
    inner = prepared.unwrap()
    own = SGD([inner.first.weight], lr=0.1)

    def update(parameter: Tensor) -> None:
        with torch.no_grad():
            parameter.add_(parameter.grad, alpha=-0.1)

    hooks = {"prepared": lambda _: step_and_clear(prepared), "own": lambda _: own.step(), "update": update}
    inner.first.weight.register_post_accumulate_grad_hook(hooks[way])

    def train_on() -> None:
        for _step in range(5):
            prepared.backward(prepared.model(torch.ones(2, 4) + dist.get_rank()).square().mean())
            for optimizer in prepared.optimizers[way == "own" :]:
                optimizer.step()

    with pytest.raises((AccumulationError, UnshardedParameterError), match=told):
        train_on()


class Rows(nn.Module):
    """A table of rows and a complex factor."""

    def __init__(self, *, sparse: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 2, sparse=sparse)
        self.factor = nn.Parameter(torch.ones(2, dtype=dtype))


@pytest.mark.parametrize(
    ("sparse", "dtype", "said"),
    [
        (True, torch.float32, r"table\.weight gets sparse gradients \(Embedding\(sparse=True\)\)"),
        (False, torch.complex64, r"factor is complex \(complex64\)"),
        (False, torch.float32, "factor has a hook of register_multi_grad_hook, which would never run"),
    ],
)
def test_parameters_that_cannot_be_divided_are_refused_by_name(
    sparse: bool, dtype: torch.dtype, said: str
) -> None:
    model = Rows(sparse=sparse, dtype=dtype)
    if not sparse and dtype is torch.float32:
        register_multi_grad_hook(list(model.parameters()), lambda _: None)
    before = model.table.weight
    with pytest.raises(ValueError, match=f"Rows: {said}.*use backend='ddp'"):
        prepare_sgd(fsdp(), model)
    assert model.table.weight is before
