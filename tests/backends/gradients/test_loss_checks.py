"""Losses whose gradients nothing would use, and what is no loss."""

import logging
import logging.handlers
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

from drivetrain_backends import AccumulationError, PairingError
from drivetrain_backends.gradients.loss_checks import LOSSES_FOLLOWED, graph_leaves
from plain_loop.backends import backend_of, fsdp, linear, prepare_sgd
from plain_loop.backends import single as backend
from plain_loop.case import train
from plain_loop.stack import CASE, loss_of, stack

X = torch.ones(1, 2)
ON_TWO = pytest.mark.ranks(2)


def test_the_leaves_of_a_graph_are_what_a_backward_adds_gradients_to() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    model[0].bias.requires_grad_(False)
    unused, x = nn.Linear(2, 1), torch.ones(4, 2, requires_grad=True)
    loss = (
        model(x).sum()
        + checkpoint(model[2], model[0](x), use_reentrant=False).sum()
        + 0 * unused.bias.detach()
    )
    found = graph_leaves(loss)
    loss.backward()
    having = [p for p in (*model.parameters(), *unused.parameters(), x) if p.grad is not None]
    assert len(found) == len(having) == 4
    assert {id(leaf) for leaf in found} == {id(p) for p in having}


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("single", marks=pytest.mark.ranks(1)),
        *(pytest.param(k, marks=ON_TWO) for k in ("ddp", "fsdp")),
    ],
)
def test_the_first_loss_of_a_model_without_an_optimizer_is_refused(kind: str, accumulation: int) -> None:
    one = backend_of(kind, accumulation=accumulation)
    (prepared,) = one.prepare([stack()], [], [])
    one.window.begin()
    said = r"Stack, of which no prepared optimizer holds a parameter.*Pass it to prepare\(\) with its model"
    with pytest.raises(PairingError, match=said):
        one.backward(loss_of(prepared.model, one.context.topology.rank))
    assert prepared.group.stage == "empty"


@pytest.mark.ranks(2)
def test_gathered_parameters_are_known_and_those_of_another_model_are_not() -> None:
    told = logging.handlers.BufferingHandler(capacity=100)
    logging.getLogger("drivetrain_backends.gradients.loss_checks").addHandler(told)
    one, _, prepared = prepare_sgd(fsdp(accumulation=2), stack())
    case = replace(CASE, accumulation=2, steps=2)
    train(case, one, [prepared])
    with pytest.raises(PairingError, match="reaches no prepared model"):
        one.backward(loss_of(stack(), 0))
    logging.getLogger("drivetrain_backends.gradients.loss_checks").removeHandler(told)
    assert not told.buffer
    assert prepared.optimizers[0].num_steps == 2


def test_a_loss_of_a_model_that_was_not_prepared_is_refused_among_others() -> None:
    model, forgotten, single = linear(), linear(), backend()
    (prepared,) = single.prepare([model], [SGD(model.parameters(), lr=0.1)], [])
    prepared.backward(model(X).sum())
    with pytest.raises(PairingError, match=r"2 parameters \(the first of shape .* another.*Pass their model"):
        single.backward(forgotten(X).sum())
    assert forgotten.weight.grad is None


def test_a_loss_that_reaches_a_foreign_parameter_too_is_told_once(caplog) -> None:
    model, beside, single = linear(), nn.Linear(1, 1), backend()
    (prepared,) = single.prepare([model], [SGD(model.parameters(), lr=0.1)], [])
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            prepared.backward(beside(model(X)).sum())
    (record,) = [r for r in caplog.records if r.name == "drivetrain_backends.gradients.loss_checks"]
    assert "2 parameters (the first of shape (1, 1)) of no prepared model" in record.getMessage()


def test_frozen_models_and_those_without_a_gradient_pass() -> None:
    single = backend()
    student, frozen, teacher = linear(), linear().requires_grad_(False), linear()
    single.prepare([student, frozen, teacher], [SGD(student.parameters(), lr=0.1)], [])
    with torch.no_grad():
        target = teacher(X)
    single.backward((frozen(student(X).expand(1, 2)) - target).square().sum())
    assert student.weight.grad is not None


def test_optimizers_may_be_prepared_later_than_a_model_and_of_models_that_train_in_turns() -> None:
    first, second, single = linear(), nn.Linear(1, 1), backend()
    single.prepare([first, second], [], [])
    single.prepare([], [SGD(first.parameters(), lr=0.1)], [])
    single.prepare([], [SGD(second.parameters(), lr=0.1)], [])
    single.backward(second(first(X)).sum())
    passed = first.weight.grad.clone()
    assert torch.equal(second.weight.grad, first(X).detach().sum(0, keepdim=True))
    single.backward(first(X).sum())
    assert torch.equal(first.weight.grad - passed, X.sum(0, keepdim=True))


def test_a_model_prepared_later_is_followed_again() -> None:
    model, later, single = linear(), linear(), backend()
    single.prepare([model], [SGD(model.parameters(), lr=0.1)], [])
    for _ in range(LOSSES_FOLLOWED + 1):
        single.backward(model(X).sum())
    single.backward(later(X).sum())  # nobody looks any more
    single.prepare([later], [], [])
    with pytest.raises(PairingError, match="trains Linear, of which no prepared optimizer"):
        single.backward(later(X).sum())


class Hidden(torch.autograd.Function):
    """A function of parameters that its graph does not show, as reentrant checkpointing is."""

    @staticmethod
    def forward(ctx, x: Tensor, model: nn.Module) -> Tensor:
        ctx.model, ctx.x = model, x.detach()
        return model(x.detach())

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        with torch.enable_grad():
            x = ctx.x.requires_grad_()
            ctx.model(x).backward(gradient)
        return x.grad, None


def test_parameters_that_a_graph_does_not_show_are_left_to_the_user() -> None:
    model, single = linear(), backend()
    single.prepare([model], [SGD(model.parameters(), lr=0.1)], [])
    single.backward(Hidden.apply(torch.ones(1, 2, requires_grad=True), model).sum())
    assert torch.equal(model.weight.grad, torch.ones(1, 2))


def refused(loss: object, count: object = None) -> None:
    single, model, prepared = prepare_sgd(backend(accumulation=2), linear())
    single.window.begin()
    try:
        single.backward(model(X).sum() if loss is None else loss, count=count)
    finally:
        prepared.backward(model(X).sum(), count=2)  # a refused loss leaves no trace in the window


@pytest.mark.parametrize(
    ("loss", "error", "said"),
    [
        ("x", TypeError, r"backward\('x'\): a loss is a tensor"),
        (1.0, TypeError, r"backward\(1\.0\): a loss is a tensor of shape \(\), not float"),
        (
            torch.ones(3, requires_grad=True),
            ValueError,
            r"shape \(3,\): a loss is of shape \(\); take its mean",
        ),
        (torch.ones(()), ValueError, "a loss without a graph: it was detached"),
    ],
)
def test_what_is_no_loss_is_refused_and_leaves_no_trace(loss: object, error, said: str) -> None:
    with pytest.raises(error, match=said):
        refused(loss)


@pytest.mark.parametrize(
    ("count", "error"),
    [
        ("3", TypeError),
        (True + 1j, TypeError),
        ([3], TypeError),
        (-4, ValueError),
        (float("nan"), ValueError),
        (float("inf"), ValueError),
        (torch.tensor([1, 2]), ValueError),
        (torch.tensor(-1), ValueError),
        (torch.tensor(float("nan")), ValueError),
    ],
)
def test_what_is_no_count_is_refused_and_leaves_no_trace(count: object, error) -> None:
    with pytest.raises(error, match="it is the number of items that the loss"):
        refused(None, count)


@pytest.mark.parametrize("count", [0, 3, 0.5, torch.tensor(3), torch.tensor([3]), torch.tensor(2.5)])
def test_counts_are_numbers_and_tensors_of_one_element(count: object) -> None:
    single, model, prepared = prepare_sgd(backend(accumulation=2), linear(), lr=1.0)
    before = model.weight.detach().clone()
    for items in (count, 2):
        single.window.begin()
        prepared.backward(model(X).sum(), count=items)
        prepared.optimizers[0].step()
    torch.testing.assert_close(before - model.weight, 2 * X.sum(0, keepdim=True) / (float(count) + 2))


def test_a_mean_and_a_sum_are_still_not_mixed() -> None:
    _single, model, prepared = prepare_sgd(backend(), linear())
    prepared.backward(model(X).sum())
    with pytest.raises(AccumulationError, match="a mean and a sum"):
        prepared.backward(model(X).sum(), count=1)
