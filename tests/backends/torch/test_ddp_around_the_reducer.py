"""Losses that come around DDP's reducer train as in a plain loop over the batches of all ranks."""

from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

from backends.replicas import ddp_backend, prepare_sgd, step_and_clear
from drivetrain_backends import DriftedReplicasError, UnreducedGradientError
from drivetrain_backends.modules.replicated_weights import check_replicas

STEPS, WINDOW = 3, 2


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
DIRECT: dict[str, Way] = {"directly": directly, "beside_one_of_ours": beside_one_of_ours}


def batch(rank: int, number: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * number + rank)) + 0.3 * number


def batches(number: int) -> list[torch.Tensor]:
    """The batches of both ranks, on the same side of what `by_turns` asks."""
    return [batch(rank, number) - batch(rank, number).mean() + number % 2 for rank in range(2)]


def summed(backward: Callable[..., None], count: int) -> Backward:
    """Take means as sums with their count."""
    return lambda loss: backward(loss * count, count=count)


def trained(
    way: Way, num_micro_batches: int, norm: float | None, *, is_counted: bool = False, **settings: object
) -> dict[str, torch.Tensor]:
    backend, model, prepared = prepare_sgd(ddp_backend(accumulation=num_micro_batches, **settings), Net())
    for number in range(STEPS * num_micro_batches):
        backend.window.begin()
        x = batches(number)[dist.get_rank()]
        with nullcontext() if backend.window.closing else prepared.no_sync():
            way(prepared.model, x, summed(prepared.backward, len(x)) if is_counted else prepared.backward)
        if norm is not None:
            prepared.clip(norm=norm)
        step_and_clear(prepared)
    backend.close()
    return {name: value.clone() for name, value in model.state_dict().items()}


def trained_in_ways(ways: list[str]) -> dict[tuple[object, ...], dict[str, torch.Tensor]]:
    found = {}
    for name in ways:
        for reduce in (None, "at_close"):
            found[name, reduce, 1, None] = trained(WAYS[name], 1, None, reduce=reduce)
            found[name, reduce, WINDOW, 0.5] = trained(WAYS[name], WINDOW, 0.5, reduce=reduce)
    return found


def trained_by_other_settings() -> dict[tuple[object, ...], dict[str, torch.Tensor]]:
    found = {}
    found["of_a_method", "counted", WINDOW, 0.5] = trained(of_a_method, WINDOW, 0.5, is_counted=True)
    unused = {"find_unused_parameters": True, "gradient_as_bucket_view": False}
    found["of_a_part", "unused", 1, None] = trained(of_a_part, 1, None, **unused)
    found["of_a_method", "bf16", 1, None] = trained(of_a_method, 1, None, communication_hook="bf16")
    for name, way in DIRECT.items():
        found[name, None, 1, 0.5] = trained(way, 1, 0.5)
    return found


def plainly(name: str, num_micro_batches: int, norm: float | None) -> dict[str, torch.Tensor]:
    model = Net()
    optimizer = SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        for number in range(step * num_micro_batches, (step + 1) * num_micro_batches):
            for x in batches(number):
                (WAYS | DIRECT)[name](model, x, lambda loss: (loss / 2 / num_micro_batches).backward())
        if name in DIRECT:  # whose backwards are not divided
            model.zero_grad()
            for x in batches(step):
                loss = model.loss(x) if name == "directly" else model.loss(x) + model.halves(x)
                (loss / 2).backward()
        if norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), norm)
        optimizer.step()
    return dict(model.state_dict())


FAST = ["of_a_method", "two_forwards_then_two_backwards", "a_call_and_a_method", "by_turns"]
SLOW = [name for name in WAYS if name not in FAST]


@pytest.mark.parametrize("ways", [FAST, pytest.param(SLOW, marks=pytest.mark.slow)], ids=["fast", "slow"])
@pytest.mark.slow
def test_losses_around_the_reducer_are_averaged_when_their_window_closes(run_ranks, ways: list[str]) -> None:
    compare(*run_ranks(trained_in_ways, ways))


def test_losses_around_the_reducer_are_averaged_whatever_ddp_is_told(run_ranks) -> None:
    compare(*run_ranks(trained_by_other_settings))


def compare(first: dict[Any, dict[str, torch.Tensor]], second: dict[Any, dict[str, torch.Tensor]]) -> None:
    """Compare what both ranks trained with a plain loop."""
    for case, weights in first.items():
        name, _, num_micro_batches, norm = case
        expected = plainly(name, num_micro_batches, norm)
        for key, value in weights.items():
            assert torch.equal(value, second[case][key]), (case, key)
            torch.testing.assert_close(value, expected[key], msg=lambda said, case=case: f"{case}: {said}")


def what_is_refused() -> dict[str, str]:
    found: dict[str, str] = {}

    def attempt(name: str, way: Callable[[Any, Any, torch.Tensor], None], **settings: object) -> None:
        backend, model, prepared = prepare_sgd(ddp_backend(**settings), Net())
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises((UnreducedGradientError, RuntimeError)) as caught:
            way(backend, prepared, batch(dist.get_rank(), 0))
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        found[name] = f"{type(caught.value).__name__}: {caught.value}"
        backend.close()

    def reach_a_part(prepared: Any, x: torch.Tensor, end: Callable[[], object]) -> None:
        prepared.model(x)
        prepared.backward(prepared.model.halves(x))
        end()

    def learn_a_static_graph_elsewhere(_: Any, prepared: Any, x: torch.Tensor) -> None:
        prepared.model(x)
        prepared.backward(prepared.model.loss(x))

    def join(backend: Any, prepared: Any, x: torch.Tensor) -> None:
        with backend.join([prepared.model]):
            prepared.backward(prepared.model.loss(x))
            prepared.optimizers[0].step()

    attempt("part, step", lambda _, prepared, x: reach_a_part(prepared, x, prepared.optimizers[0].step))
    attempt("part, clip", lambda _, prepared, x: reach_a_part(prepared, x, lambda: prepared.clip(norm=1.0)))
    attempt("static", learn_a_static_graph_elsewhere, static_graph=True)
    attempt("join", join)
    attempt("join at close", join, reduce="at_close")
    return found


def test_what_cannot_be_averaged_is_refused_before_a_step(run_ranks) -> None:
    for found in run_ranks(what_is_refused):
        for name in ("part, step", "part, clip"):
            assert found[name].startswith(
                "UnreducedGradientError: the last backward gave no gradient to first"
            )
            assert "--ddp-reduce at_close" in found[name]
        assert "DDP learns a static graph" in found["static"]
        assert "came around DDP's reducer inside join_uneven_inputs" in found["join"]
        assert "join_uneven_inputs with --ddp-reduce at_close" in found["join at close"]


def trained_apart() -> dict[str, torch.Tensor]:
    """Ranks run other parts of the model, and one of them none, which only `at_close` allows."""
    backend = ddp_backend(reduce="at_close", broadcast_buffers=False)
    model = Net()
    model.table = nn.Embedding(5, 4, sparse=True)
    model.frozen.requires_grad_(False)
    (prepared,) = backend.prepare([model], [SGD(model.parameters(), lr=0.1)], [])
    model.frozen.requires_grad_(True)  # trained later
    for step in range(3):
        x = batch(dist.get_rank(), step)
        rows = model.table(torch.tensor([dist.get_rank(), 3]))
        if dist.get_rank() == 0:
            prepared.backward(prepared.model(x).mean() + rows.sum())
        elif step:
            prepared.backward(prepared.model.halves(x) + rows.square().sum())
        step_and_clear(prepared)
    backend.close()
    return {name: value.clone() for name, value in model.state_dict().items()}


def test_averaging_at_the_close_lets_ranks_run_other_parts(run_ranks) -> None:
    torch.manual_seed(0)
    model = Net()
    model.table = nn.Embedding(5, 4, sparse=True)
    model.frozen.requires_grad_(True)
    optimizer = SGD(model.parameters(), lr=0.1)
    for step in range(3):
        zero, one = batch(0, step), batch(1, step)
        (model(zero).mean() / 2 + model.table(torch.tensor([0, 3])).sum() / 2).backward()
        if step:
            ((model.halves(one) + model.table(torch.tensor([1, 3])).square().sum()) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for weights in run_ranks(trained_apart):
        torch.testing.assert_close(weights, dict(model.state_dict()))


def cleared_on_one_rank(way: Way, reduce: str | None) -> list[tuple[torch.Tensor, bool]]:
    """Train three steps, in the second of which rank 1 clears its gradients before it steps.

    Returns:
        The tied weight after each step, and whether ranks hold the same weights.
    """
    backend, model, prepared = prepare_sgd(ddp_backend(reduce=reduce), Net())
    found = []
    for step in range(3):
        way(prepared.model, batches(step)[dist.get_rank()], prepared.backward)
        if step == 1 and dist.get_rank():
            prepared.optimizers[0].zero_grad()
        is_same = False
        with suppress(DriftedReplicasError):
            step_and_clear(prepared)  # the second one compares
            check_replicas(backend.context, [model])
            is_same = True
        found.append((model.first.weight.detach().clone(), is_same))
    backend.close()
    return found


def by_calls(model: Any, x: torch.Tensor, backward: Backward) -> None:
    backward(model(x).square().mean())


def test_a_rank_that_clears_alone_steps_on_what_it_has(run_ranks) -> None:
    zero, one = run_ranks(cleared_on_one_rank, by_calls, None)
    assert [same for _, same in zero] == [same for _, same in one] == [True, False, False]
    assert torch.equal(one[1][0], one[0][0])
    assert not torch.equal(zero[1][0], zero[0][0])


@pytest.mark.parametrize(("way", "reduce"), [(by_calls, "at_close"), (of_a_method, None)])
def test_a_rank_that_clears_alone_adds_nothing_to_what_is_averaged_at_the_close(
    run_ranks, way: Way, reduce: str | None
) -> None:
    for found in run_ranks(cleared_on_one_rank, way, reduce):
        assert all(same for _, same in found)
        assert not torch.equal(found[1][0], found[0][0])


EDIT_ON_ONE_RANK = """
import torch
from torch import nn
from drivetrain_backends import AccumulationWindow, DDPBackend
from drivetrain_precision import choose_policy
from drivetrain_state import StateSettings, connect
context = connect(StateSettings(device="cpu", hang_timeout_seconds=1, timeout_seconds=4))
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
    # The watchdog's limit and gloo's are both 4 s: the watchdog ends a rank while Python tears it down.
    zero, _ = run_ranks_script(f"import os; os.chdir({str(tmp_path)!r})\n" + EDIT_ON_ONE_RANK, fresh=True)
    assert zero.returncode == 124
    assert "Last progress: averaging gradients at the window's close" in zero.stderr
