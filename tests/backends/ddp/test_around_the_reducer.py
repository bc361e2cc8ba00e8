"""Losses that come around DDP's reducer train as in a plain loop over the batches of all ranks."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

from drivetrain_backends import DriftedReplicasError, UnreducedGradientError
from drivetrain_backends.modules.replicated_weights import check_replicas
from plain_loop.backends import ddp, plain_step, prepare_sgd, step_and_clear
from plain_loop.case import Case, Trained, assert_equal, assert_same_on_all_ranks, run_on_ranks, run_plain

WINDOW = 2


class Net(nn.Module):
    """Two layers with a tied third, a frozen one, and a batch normalisation whose buffers rank 0 shares."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.frozen = nn.Linear(4, 4), nn.Linear(4, 1), nn.Linear(4, 4)
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.first.weight
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.tied(self.first(self.frozen(x)))))

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return self(x).square().mean()

    def halves(self, x: torch.Tensor) -> torch.Tensor:
        """A part of the parameters."""
        return self.second(x).abs().mean()


Backward = Callable[[torch.Tensor], None]
Way = Callable[[Any, torch.Tensor, Backward], None]


def of_a_method(model: Any, x: torch.Tensor, backward: Backward) -> None:
    backward(model.loss(x))


def of_a_part(model: Any, x: torch.Tensor, backward: Backward) -> None:
    backward(model.halves(x))


def of_the_users_module(model: Any, x: torch.Tensor, backward: Backward) -> None:
    backward(getattr(model, "module", model)(x).square().mean())


def two_forwards_then_two_backwards(model: Any, x: torch.Tensor, backward: Backward) -> None:
    first, second = model(x).square().mean(), model(2 * x).abs().mean()
    backward(first)
    backward(second)


def one_forward_and_two_backwards(model: Any, x: torch.Tensor, backward: Backward) -> None:
    loss = model(x).square().mean()
    loss.register_hook(lambda g: g)
    penalty = sum(p.square().sum() for p in model.second.parameters())
    backward(loss)
    backward(penalty)


def a_call_and_a_method(model: Any, x: torch.Tensor, backward: Backward) -> None:
    backward(model(x).square().mean() + model.halves(x))
    backward(model.loss(2 * x))


def a_method_while_a_call_waits(model: Any, x: torch.Tensor, backward: Backward) -> None:
    called = model(x).square().mean()
    backward(model.loss(2 * x))
    backward(called)


def recomputed(model: Any, x: torch.Tensor, backward: Backward) -> None:
    backward(checkpoint(model.loss, x, use_reentrant=False))


def with_a_gradient_penalty(model: Any, x: torch.Tensor, backward: Backward) -> None:
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model.loss(x), x, create_graph=True)
    backward(model(x).square().mean())
    backward(slope.square().sum())


def by_turns(model: Any, x: torch.Tensor, backward: Backward) -> None:
    """Averaged by the reducer in one step, by nobody in another."""
    (of_a_method if x.mean() > 0.3 else two_forwards_then_two_backwards)(model, x, backward)


def directly(model: Any, x: torch.Tensor, backward: Backward) -> None:
    del backward
    model.loss(x).backward()


def beside_one_of_ours(model: Any, x: torch.Tensor, backward: Backward) -> None:
    backward(model(x).square().mean())
    model.halves(x).backward()


def both_together(model: Any, x: torch.Tensor, backward: Backward) -> None:
    backward(model.loss(x) + model.halves(x))


WAYS: dict[str, Way] = {
    way.__name__: way
    for way in (
        of_a_method,
        of_a_part,
        of_the_users_module,
        two_forwards_then_two_backwards,
        one_forward_and_two_backwards,
        a_call_and_a_method,
        a_method_while_a_call_waits,
        recomputed,
        with_a_gradient_penalty,
        by_turns,
    )
}


def batch(rank: int, number: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * number + rank)) + 0.3 * number


def batches(number: int) -> list[torch.Tensor]:
    """The batches of both ranks, on the same side of what `by_turns` asks."""
    return [batch(rank, number) - batch(rank, number).mean() + number % 2 for rank in range(2)]


def case_of(way: Way, num_micro_batches: int, norm: float | None, *, is_counted: bool = False) -> Case:
    def micro_batch(model: Any, rank: int, number: int, backward: Backward) -> None:
        items = 3 if is_counted else 1
        way(model, batches(number)[rank], lambda loss: backward(loss * items))

    return Case(
        build=Net,
        micro_batch=micro_batch,
        accumulation=num_micro_batches,
        count=3 if is_counted else None,
        clip=None if norm is None else {"norm": norm},
    )


def compare(found: Trained, expected: Trained) -> None:
    """Compare weights and norms: rank 0's buffers are everybody's."""
    assert_same_on_all_ranks(found.weights)
    assert_equal(*(Trained(weights=each.weights, norms=each.norms) for each in (found, expected)))


@pytest.mark.slow
@pytest.mark.ranks(2)
@pytest.mark.parametrize(("length", "norm"), [(1, None), (WINDOW, 0.5)])
@pytest.mark.parametrize("reduce", [None, "at_close"])
@pytest.mark.parametrize("name", WAYS)
def test_losses_around_the_reducer_are_averaged_when_their_window_closes(
    name: str, reduce: str | None, length: int, norm: float | None
) -> None:
    case = case_of(WAYS[name], length, norm)
    compare(run_on_ranks(case, ddp(accumulation=length, reduce=reduce)), run_plain(case, 2))


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("way", "length", "norm", "is_counted", "settings"),
    [
        (of_a_method, WINDOW, 0.5, True, {}),
        (of_a_part, 1, None, False, {"find_unused_parameters": True, "gradient_as_bucket_view": False}),
        (of_a_method, 1, None, False, {"communication_hook": "bf16"}),
    ],
)
def test_losses_around_the_reducer_are_averaged_whatever_ddp_is_told(
    way: Way, length: int, norm: float | None, is_counted: bool, settings: dict[str, Any]
) -> None:
    case = case_of(way, length, norm, is_counted=is_counted)
    compare(run_on_ranks(case, ddp(accumulation=length, **settings)), run_plain(case, 2))


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("way", "alike"),
    [
        (directly, of_a_method),
        (beside_one_of_ours, both_together),
    ],
)
def test_plain_backwards_are_averaged_too(way: Way, alike: Way) -> None:
    compare(run_on_ranks(case_of(way, 1, 0.5), ddp()), run_plain(case_of(alike, 1, 0.5), 2))


Act = Callable[[Any, Any, torch.Tensor], None]


def reach_a_part(_: Any, prepared: Any, x: torch.Tensor, *, clips: bool) -> None:
    prepared.model(x)
    prepared.backward(prepared.model.halves(x))
    if clips:
        prepared.clip(norm=1.0)
    prepared.optimizers[0].step()


def learn_a_static_graph_elsewhere(_: Any, prepared: Any, x: torch.Tensor) -> None:
    prepared.model(x)
    prepared.backward(prepared.model.loss(x))


def join(backend: Any, prepared: Any, x: torch.Tensor) -> None:
    with backend.join([prepared.model]):
        prepared.backward(prepared.model.loss(x))
        prepared.optimizers[0].step()


PART = "^the last backward gave no gradient to first.*--ddp-reduce at_close"


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("act", "settings", "said"),
    [
        (partial(reach_a_part, clips=False), {}, PART),
        (partial(reach_a_part, clips=True), {}, PART),
        (learn_a_static_graph_elsewhere, {"static_graph": True}, "DDP learns a static graph"),
        (join, {}, "came around DDP's reducer inside join_uneven_inputs"),
        (join, {"reduce": "at_close"}, "join_uneven_inputs with --ddp-reduce at_close"),
    ],
    ids=["part, step", "part, clip", "static", "join", "join at close"],
)
def test_what_cannot_be_averaged_is_refused_before_a_step(act: Act, settings: dict, said: str) -> None:
    backend, model, prepared = prepare_sgd(ddp(**settings), Net())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises((UnreducedGradientError, RuntimeError), match=said) as caught:
        act(backend, prepared, batch(dist.get_rank(), 0))
    assert said is not PART or type(caught.value) is UnreducedGradientError
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def with_a_table() -> Net:
    model = Net()
    model.table = nn.Embedding(5, 4, sparse=True)
    return model


@pytest.mark.ranks(2)
def test_averaging_at_the_close_lets_ranks_run_other_parts() -> None:
    """And one of them none."""
    plain, model, rank = with_a_table(), with_a_table(), dist.get_rank()
    _, _, prepared = prepare_sgd(ddp(reduce="at_close", broadcast_buffers=False), model)
    for one in (plain, model):
        one.frozen.requires_grad_(True)  # of the prepared one later than at `prepare`
    optimizer = SGD(plain.parameters(), lr=0.1)

    def loss(model: Any, rank: int, step: int) -> torch.Tensor:
        x, rows = batch(rank, step), model.table(torch.tensor([rank, 3]))
        return model.halves(x) + rows.square().sum() if rank else model(x).mean() + rows.sum()

    for step in range(3):
        plain_step(optimizer, sum(loss(plain, each, step) for each in range(1 + bool(step))) / 2)
        if step or rank == 0:
            prepared.backward(loss(prepared.model, rank, step))
        step_and_clear(prepared)
    torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()))


def cleared_on_one_rank(way: Way, reduce: str | None) -> tuple[list[torch.Tensor], list[bool]]:
    """Train three steps, in the second of which rank 1 clears its gradients before it steps.

    Returns:
        The tied weight after each step, and whether ranks hold the same weights.
    """
    backend, model, prepared = prepare_sgd(ddp(reduce=reduce), Net())
    found: list[torch.Tensor] = []
    same: list[bool] = []
    for step in range(3):
        way(prepared.model, batches(step)[dist.get_rank()], prepared.backward)
        if step == 1 and dist.get_rank():
            prepared.optimizers[0].zero_grad()
        same.append(False)
        with suppress(DriftedReplicasError):
            step_and_clear(prepared)  # the second one compares
            check_replicas(backend.context, [model])
            same[-1] = True
        found.append(model.first.weight.detach().clone())
    return found, same


def by_calls(model: Any, x: torch.Tensor, backward: Backward) -> None:
    backward(model(x).square().mean())


@pytest.mark.ranks(2)
def test_a_rank_that_clears_alone_steps_on_what_it_has() -> None:
    found, same = cleared_on_one_rank(by_calls, None)
    assert same == [True, False, False]
    assert torch.equal(found[1], found[0]) == (dist.get_rank() == 1)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("way", "reduce"), [(by_calls, "at_close"), (of_a_method, None)])
def test_a_rank_that_clears_alone_adds_nothing_to_what_is_averaged_at_the_close(
    way: Way, reduce: str | None
) -> None:
    found, same = cleared_on_one_rank(way, reduce)
    assert all(same)
    assert not torch.equal(found[1], found[0])


EDIT_ON_ONE_RANK = """
import torch
from torch import nn
from drivetrain_backends import AccumulationWindow, DDPBackend
from drivetrain_precision import choose_policy
from drivetrain_state import StateSettings, connect
context = connect(StateSettings(device="cpu", hang_timeout_seconds=4, timeout_seconds=12))
backend = DDPBackend(context, choose_policy("no", context.device), window=AccumulationWindow())
model = nn.Linear(2, 1)
(prepared,) = backend.prepare([model], [torch.optim.SGD(model.parameters(), lr=0.1)], [])
for step in range(3):
    prepared.backward(prepared.model(torch.ones(1, 2)).sum())
    if step == 1 and context.topology.rank == 0:
        model.weight.grad.add_(1)
    prepared.optimizers[0].step()
    prepared.optimizers[0].zero_grad()
"""


@pytest.mark.slow
def test_a_gradient_that_one_rank_edits_is_a_wait_that_the_watchdog_names(run_ranks_script, tmp_path) -> None:
    # The watchdog's limit and gloo's are both 12 s: either ends the rank.
    zero, _ = run_ranks_script(f"import os; os.chdir({str(tmp_path)!r})\n" + EDIT_ON_ONE_RANK, fresh=True)
    assert zero.returncode in (1, 124)
    assert "averaging gradients at the window's close" in zero.stderr


class Branches(nn.Module):
    """Two weights, of which a forward may use one alone."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)

    def forward(self, x: Tensor, *, both: bool) -> Tensor:
        """Map (batch, 1) to (batch, 1)."""
        return self.a(x) + self.b(x) if both else self.a(x)


@pytest.mark.ranks(2)
def test_an_edit_of_a_gradient_that_the_last_backward_does_not_reach_is_averaged() -> None:
    torch.manual_seed(0)
    options = {"find_unused_parameters": True, "gradient_as_bucket_view": False}
    backend, model, prepared = prepare_sgd(ddp(**options), Branches(), lr=1.0)
    rank = dist.get_rank()
    for _ in range(4):
        before = model.b.weight.item()
        backend.window.begin(is_last=True)
        prepared.backward(prepared.model(torch.ones(1, 1), both=True).sum())
        model.b.weight.grad += 10.0 * rank
        prepared.backward(prepared.model(torch.ones(1, 1), both=False).sum())
        step_and_clear(prepared)
        assert before - model.b.weight.item() == pytest.approx(6.0)  # 1, and 10 on one of two ranks
