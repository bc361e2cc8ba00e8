"""`train_step` gives the same numbers, bit for bit, as the loop with `accumulate`."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator, AccumulationError, PairingError


class Case(NamedTuple):
    backend: str = "single"
    accumulation: int = 1
    counted: bool = False
    max_norm: float | None = None
    precision: Any = "no"


class Trained(NamedTuple):
    weights: Tensor
    losses: list[float]
    norms: list[float | None]  # one a micro-batch
    steps: list[bool]  # whether each micro-batch stepped
    skipped: list[bool]
    rate: float


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return (model(x) - y).float().square().mean()


def counted_loss_of(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    x, y = batch
    return (model(x) - y).float().square().sum(), len(x)


def train(case: Case, *, in_one_call: bool) -> Trained:
    """Train two epochs of 9 uneven batches; the last window of each has fewer micro-batches."""
    accelerator = Accelerator(
        cpu=True,
        backend=case.backend,
        seed=5,
        mixed_precision=case.precision,
        gradient_accumulation_steps=case.accumulation,
        sections={"run": {"show_plan": False}},
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = AdamW(model.parameters(), lr=0.1)
    scheduler = LinearLR(optimizer, 1.0, 0.1, total_iters=20)
    data = TensorDataset(torch.randn(33, 5), torch.randn(33, 1))
    loader = DataLoader(data, batch_size=4 // accelerator.num_processes, shuffle=True)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    find = counted_loss_of if case.counted else loss_of
    found = Trained(torch.empty(0), [], [], [], [], 0.0)
    for _ in range(2):
        for batch in loader:
            if in_one_call:
                result = accelerator.train_step(batch, loss=find, max_norm=case.max_norm)
                loss, norm, stepped, skipped = result.loss, result.grad_norm, result.stepped, result.skipped
                assert not loss.requires_grad
            else:
                before = optimizer.num_steps
                with accelerator.accumulate(model):
                    value = find(model, batch)
                    loss, count = value if isinstance(value, tuple) else (value, None)
                    accelerator.backward(loss, count=count)
                    if case.max_norm is not None:
                        accelerator.clip_grad_norm_(model.parameters(), case.max_norm)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                norm, skipped = optimizer.last_result.grad_norm, optimizer.last_result.skipped
                stepped = optimizer.num_steps > before
            found.losses.append(loss.item())
            found.norms.append(None if norm is None else norm.item())
            found.steps.append(stepped)
            found.skipped.append(skipped)
    state = accelerator.get_state_dict(model, everywhere=True)
    weights = torch.cat([value.flatten() for value in state.values()])
    rate = scheduler.get_last_lr()[0]
    accelerator.free_memory()
    return found._replace(weights=weights, rate=rate)


def check_equal(one: Trained, other: Trained) -> None:
    assert torch.equal(one.weights, other.weights)
    assert one[1:] == other[1:]


@pytest.mark.default_cases("plain", "all", "bf16", "fp16-3")
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(), id="plain"),
        pytest.param(Case(accumulation=3), id="3"),
        pytest.param(Case(accumulation=3, counted=True), id="count-3"),
        pytest.param(Case(max_norm=0.1), id="clipped"),
        pytest.param(Case(accumulation=3, counted=True, max_norm=0.1), id="all-count-3"),
        pytest.param(Case(precision="bf16", accumulation=3), id="bf16-3"),
        pytest.param(Case(precision="fp16", accumulation=3, max_norm=0.1), id="fp16-3"),
        pytest.param(Case(precision="fp16"), id="fp16-1"),
    ],
)
def test_a_call_equals_the_loop(case: Case) -> None:
    loop, call = train(case, in_one_call=False), train(case, in_one_call=True)
    check_equal(loop, call)
    assert sum(call.steps) + sum(call.skipped) == 2 * -(-9 // case.accumulation)
    assert any(call.steps)


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("counted", [False, True], ids=["mean", "count"])
@pytest.mark.parametrize("backend", ["ddp", "fsdp"])
@pytest.mark.default_cases("ddp-count-3", "fsdp-mean-3")
def test_a_call_equals_the_loop_on_two_ranks(
    run_ranks, backend: str, counted: bool, accumulation: int
) -> None:
    case = Case(backend, accumulation, counted, max_norm=0.5)
    for loop, call in run_ranks(both, case, num_processes=2):
        check_equal(loop, call)
        assert any(call.steps)


def both(case: Case) -> tuple[Trained, Trained]:
    return train(case, in_one_call=False), train(case, in_one_call=True)


class TestRefusals:
    def test_an_exception_in_the_loss_fails_the_micro_batch_of_the_window(self) -> None:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        linear = nn.Linear(2, 1)
        model, optimizer = accelerator.prepare(linear, SGD(linear.parameters(), lr=0.1))

        def failing(model: nn.Module, batch: Tensor) -> Tensor:
            raise OSError(f"no label for {model(batch).shape}")

        def mean(model: nn.Module, batch: Tensor) -> Tensor:
            return model(batch).mean()

        x = torch.ones(3, 2)
        with pytest.raises(OSError, match="no label"):
            accelerator.train_step(x, loss=failing)
        assert not accelerator.sync_gradients
        with pytest.raises(AccumulationError, match="a micro-batch ended in an exception"):
            accelerator.train_step(x, loss=mean)
        optimizer.zero_grad()
        assert not accelerator.train_step(x, loss=mean).stepped
        assert accelerator.train_step(x, loss=mean).stepped
        assert accelerator.train_step(x, loss=mean, last=True).stepped
        assert model.weight.grad is None

    def test_several_trained_models_need_a_name(self) -> None:
        accelerator = Accelerator(cpu=True)
        one, two, frozen = (nn.Linear(2, 1) for _ in range(3))
        frozen.requires_grad_(False)
        first, second, frozen, *_ = accelerator.prepare(
            one, two, frozen, SGD(one.parameters(), lr=0.1), SGD(two.parameters(), lr=0.1)
        )
        x = torch.ones(3, 2)
        with pytest.raises(
            AccumulationError, match=r"2 prepared models have optimizers.*say which one with model="
        ):
            accelerator.train_step(x, loss=lambda model, x: model(x).mean())
        before = second.weight.clone()
        assert accelerator.train_step(x, loss=lambda model, x: model(x).mean(), model=first).stepped
        assert torch.equal(second.weight, before)
        with pytest.raises(PairingError, match="no optimizer was prepared"):
            accelerator.train_step(x, loss=lambda model, x: model(x).mean(), model=frozen)

    def test_no_trained_model_is_refused(self) -> None:
        accelerator = Accelerator(cpu=True)
        accelerator.prepare(nn.Linear(2, 1))
        with pytest.raises(AccumulationError, match="0 prepared models have optimizers: prepare\\(\\) one"):
            accelerator.train_step(torch.ones(3, 2), loss=lambda model, x: model(x).mean())

    def test_a_call_inside_a_micro_batch_is_refused(self) -> None:
        accelerator = Accelerator(cpu=True)
        linear = nn.Linear(2, 1)
        model, _ = accelerator.prepare(linear, SGD(linear.parameters(), lr=0.1))
        with accelerator.accumulate(model), pytest.raises(AccumulationError, match="one micro-batch is open"):
            accelerator.train_step(torch.ones(3, 2), loss=lambda model, x: model(x).mean())


def test_the_model_that_is_named_is_the_one_called() -> None:
    accelerator = Accelerator(cpu=True)
    linear = nn.Linear(2, 1)
    model, *_ = accelerator.prepare(
        linear, SGD(linear.parameters(), lr=0.1), SGD(linear.parameters(), lr=0.2)
    )
    called: list[nn.Module] = []

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        called.append(model)
        return model(batch).mean()

    before = model.bias.item()
    result = accelerator.train_step(torch.ones(3, 2), loss=loss, model=model)
    accelerator.train_step(torch.ones(3, 2), loss=loss)
    assert called == [model, model]
    assert result.stepped
    assert result.grad_norm is None
    assert model.bias.item() == pytest.approx(before - 2 * 0.3)  # both optimizers stepped, twice
