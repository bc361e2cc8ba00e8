"""Learning-rate finder and gradient noise: their numbers, and a run that goes on as if they had not been."""

import json
import time
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator, AccumulationError, find_learning_rate, gradient_noise
from drivetrain_backends import NonFiniteGradientError
from logged_messages import messages_of

QUIET: Any = {"run": {"show_plan": False}}


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


class Run:
    """A small training with dropout, batch norm, momentum and a schedule that ends with the training."""

    def __init__(self, *, sections: Any = QUIET, **settings: Any) -> None:
        self.accelerator = Accelerator(cpu=True, seed=0, sections=sections, **settings)
        inputs = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))
        data = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
        model = nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1)
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=16)
        loader = DataLoader(data, batch_size=8, shuffle=True)
        self.model, self.optimizer, self.schedule, self.loader = self.accelerator.prepare(
            model, optimizer, schedule, loader
        )

    def train(self) -> dict[str, torch.Tensor]:
        for batch in self.loader:
            self.accelerator.train_step(batch, loss=loss_of)
        found = self.accelerator.get_state_dict(self.model, everywhere=True)
        self.accelerator.end_training()
        return found


def assert_a_rate_is_found(run: Run) -> None:
    found = find_learning_rate(
        run.accelerator, run.model, run.loader, loss=loss_of, num_steps=60, lowest=1e-4, highest=100
    )
    assert found.rates[0] == pytest.approx(1e-4)
    assert 1e-4 < found.suggestion < 1
    assert len(found.rates) < 60  # it has diverged


def assert_trains_as(run: Run, plain: dict[str, torch.Tensor]) -> None:
    for name, value in run.train().items():
        assert torch.equal(value, plain[name]), name


@pytest.mark.ranks(2)
@pytest.mark.default_cases("ddp")
@pytest.mark.parametrize("backend", ["ddp", "fsdp"])
def test_a_run_goes_on_as_if_nothing_had_been_tried(backend: str) -> None:
    plain = Run(backend=backend).train()
    run = Run(backend=backend)
    assert_a_rate_is_found(run)
    noise = gradient_noise(run.accelerator, run.model, run.loader, loss=loss_of, num_batches=4)
    assert noise.noise > 0
    assert_trains_as(run, plain)


def test_a_loss_that_is_not_finite_ends_a_probe_and_not_the_run() -> None:
    run = Run(sections={"run": {"show_plan": False, "on_nonfinite": "raise"}})
    num_calls = 0

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        nonlocal num_calls
        num_calls += 1
        return loss_of(model, batch) * (torch.nan if num_calls == 10 else 1.0)

    found = find_learning_rate(run.accelerator, run.model, run.loader, loss=loss, num_steps=20)
    assert len(found.rates) == 9
    assert run.accelerator.window.on_nonfinite == "raise"
    run.accelerator.backward(loss_of(run.model, next(iter(run.loader))) * torch.nan)
    with pytest.raises(NonFiniteGradientError):
        run.optimizer.step()


def test_a_gradient_that_is_not_finite_has_no_noise() -> None:
    run = Run()
    with pytest.raises(ValueError, match="a gradient holds an infinity or NaN; in fp16, train some steps"):
        gradient_noise(
            run.accelerator,
            run.model,
            run.loader,
            loss=lambda *args: loss_of(*args) * torch.nan,
            num_batches=2,
        )


def test_buffers_that_are_in_no_checkpoint_are_put_back() -> None:
    run = Run()
    run.accelerator.unwrap_model(run.model)[1].register_buffer("seen", torch.zeros(1), persistent=False)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        model[1].seen += 1
        return loss_of(model, batch)

    find_learning_rate(run.accelerator, run.model, run.loader, loss=loss, num_steps=3)
    assert run.model[1].seen.item() == 0


@pytest.mark.slow
@pytest.mark.ranks(2)
@pytest.mark.usefixtures("deepspeed_operators")
def test_an_engine_goes_on_as_if_nothing_had_been_tried() -> None:
    plain = Run(backend="deepspeed").train()
    run = Run(backend="deepspeed")
    assert_a_rate_is_found(run)
    with pytest.raises(AccumulationError):
        gradient_noise(run.accelerator, run.model, run.loader, loss=loss_of, num_batches=4)
    assert_trains_as(run, plain)


@pytest.mark.slow
def test_accumulated_steps_and_a_project_are_left_as_they_were(tmp_path: Path) -> None:
    settings: Any = {"gradient_accumulation_steps": 2, "project_dir": tmp_path}
    plain = Run(**settings).train()
    run = Run(**settings)
    files = sorted(tmp_path.iterdir())
    find_learning_rate(run.accelerator, run.model, run.loader, loss=loss_of, num_steps=5)
    gradient_noise(run.accelerator, run.model, run.loader, loss=loss_of)
    assert sorted(tmp_path.iterdir()) == files
    for name, value in run.train().items():
        assert torch.equal(value, plain[name]), name


@pytest.mark.parametrize("probe", [find_learning_rate, gradient_noise])
def test_the_first_steps_behind_a_probe_are_looked_at(probe: Any, caplog: pytest.LogCaptureFixture) -> None:
    run = Run()
    probe(run.accelerator, run.model, run.loader, loss=loss_of)
    assert caplog.messages == []
    for batch in islice(run.loader, 3):
        run.accelerator.backward(loss_of(run.model, batch))
        run.optimizer.step()
    assert len(caplog.messages) == 1
    assert "SGD adds the gradients of this step to those of the one before" in caplog.messages[0]
    run.accelerator.end_training()


def test_a_probe_that_diverges_is_not_told_of_and_counts_no_steps(caplog: pytest.LogCaptureFixture) -> None:
    run = Run()
    find_learning_rate(run.accelerator, run.model, run.loader, loss=loss_of, num_steps=20)
    for batch in islice(run.loader, 16):
        run.accelerator.train_step(batch, loss=lambda model, batch: loss_of(model, batch) * torch.nan)
    assert [one.partition(",")[0] for one in caplog.messages] == ["the loss of step 1 is nan"]
    run.accelerator.end_training()


@pytest.mark.slow
def test_a_probe_is_not_measured_beside_the_plan() -> None:
    run = Run(backend="auto")
    find_learning_rate(run.accelerator, run.model, run.loader, loss=loss_of, num_steps=10)
    assert "measured" not in run.accelerator.plan.facts
    for batch in islice(run.loader, 6):
        run.accelerator.train_step(batch, loss=loss_of)
    assert "measured" in run.accelerator.plan.facts
    run.accelerator.end_training()


def test_what_a_probe_trains_is_neither_measured_nor_logged(tmp_path: Path) -> None:
    slept = list[float]()

    def slow(model: nn.Module, batch: Any) -> torch.Tensor:
        begun = time.perf_counter()
        time.sleep(0.1)
        slept.append(time.perf_counter() - begun)
        return loss_of(model, batch)

    sections = {**QUIET, "tracking": {"throughput_every_steps": 1}}
    with messages_of("drivetrain_tracking") as told:
        run = Run(sections=sections, project_dir=tmp_path, log_with="jsonl")
        run.accelerator.init_trackers("run")
        begun = time.perf_counter()
        for batch in islice(run.loader, 4):
            run.accelerator.train_step(batch, loss=loss_of)
        find_learning_rate(run.accelerator, run.model, run.loader, loss=slow, num_steps=10)
        gradient_noise(run.accelerator, run.model, run.loader, loss=slow, num_batches=3)
        for batch in islice(run.loader, 4):
            run.accelerator.train_step(batch, loss=loss_of)
        taken = time.perf_counter() - begun
        measured = run.accelerator.total_throughput
        run.accelerator.end_training()
    assert measured.num_steps == 8
    assert measured.samples_per_second == pytest.approx(8 * 8 / measured.seconds)
    assert measured.seconds <= taken - sum(slept)
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "throughput/steps_per_second" in line] == list(range(1, 9))
    assert not any("attempt" in line for line in lines)
    assert told == []


def test_the_noise_of_gaussian_gradients_is_found() -> None:
    accelerator = Accelerator(cpu=True, seed=0, sections=QUIET)
    data = (
        torch.randn(8193, 10, generator=torch.Generator().manual_seed(0)) + 0.5
    )  # one in a short last batch
    model, loader = nn.Linear(10, 1, bias=False), DataLoader(data, batch_size=64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    found = gradient_noise(
        accelerator, model, loader, loss=lambda model, batch: model(batch).mean(), num_batches=128
    )
    accelerator.end_training()
    # The gradient of a sample is the sample: its mean is 0.5 in each of ten places, with variance 1.
    assert found.gradient == pytest.approx(2.5, rel=0.05)
    assert found.noise == pytest.approx(10, rel=0.1)
    assert found.scale == pytest.approx(4, rel=0.15)


@pytest.mark.parametrize(
    "wrong", [{"lowest": 0.0}, {"lowest": 1.0, "highest": 0.5}, {"num_steps": 1}, {"highest": float("nan")}]
)
def test_rates_that_do_not_rise_are_refused(wrong: dict[str, Any]) -> None:
    run = Run()
    with pytest.raises(ValueError, match="the rates rise from above 0, in at least 2 steps"):
        find_learning_rate(run.accelerator, run.model, run.loader, loss=loss_of, **wrong)
    run.accelerator.end_training()


def test_too_few_batches_are_refused() -> None:
    run = Run()
    with pytest.raises(
        ValueError,
        match="needs as many whole batches, at least 2, of a known size on each rank, and the loader gave 32",
    ):
        gradient_noise(run.accelerator, run.model, run.loader, loss=loss_of, num_batches=33)
    run.accelerator.end_training()


@pytest.mark.parametrize("probe", [find_learning_rate, gradient_noise])
def test_an_error_in_the_loss_leaves_one_process_as_it_was(probe: Any) -> None:
    plain = Run(gradient_accumulation_steps=2).train()
    run, calls = Run(gradient_accumulation_steps=2), list[int]()

    def fails(model: nn.Module, batch: Any) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 5:
            raise ZeroDivisionError
        return loss_of(model, batch)

    with pytest.raises(ZeroDivisionError):
        probe(run.accelerator, run.model, run.loader, loss=fails)
    found = run.train()
    assert all(torch.equal(value, plain[name]) for name, value in found.items())


def test_a_warm_up_from_zero_is_probed_and_a_loss_that_is_nan_is_refused() -> None:
    run = Run()
    for group in run.optimizer.param_groups:
        group["lr"] = 0.0
    found = find_learning_rate(run.accelerator, run.model, run.loader, loss=loss_of, num_steps=4)
    assert len(found.rates) == 4
    with pytest.raises(ValueError, match="the loss of the first step is not finite"):
        find_learning_rate(
            run.accelerator,
            run.model,
            run.loader,
            loss=lambda model, batch: loss_of(model, batch) * torch.nan,
        )
    run.accelerator.end_training()


def test_a_loader_that_was_not_prepared_is_refused() -> None:
    run = Run()
    for probe in (find_learning_rate, gradient_noise):
        with pytest.raises(TypeError, match=r"of type DataLoader: pass the one that prepare\(\) returned"):
            probe(run.accelerator, run.model, DataLoader(range(4)), loss=loss_of)  # type: ignore[arg-type]
    run.accelerator.end_training()
