"""Rows of the table "Where it differs" about accumulation, gradients and batches, on one process."""

import copy
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from accelerate_sides import SIDES, Side, on_sides, said

pytest.importorskip("accelerate")


@dataclass
class Sample:
    values: torch.Tensor


def one_weight(accelerator: Any) -> Any:
    """Return a prepared weight of 0 and its optimizer; the gradient of `-model(1)` is -1."""
    given = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(given.weight)
    return accelerator.prepare(given, torch.optim.SGD(given.parameters(), lr=1.0))


def weight_after_an_epoch(accelerator: Any) -> float:
    """Return the weight after windows of two micro-batches and of one."""
    ones: Any = torch.ones(3, 1)
    (model, optimizer), loader = one_weight(accelerator), accelerator.prepare(DataLoader(ones))
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(-model(batch).mean())
            optimizer.step()
            optimizer.zero_grad()
    return model.weight.item()


def test_early_window() -> None:
    """a window of accumulation that closes early"""
    theirs, ours, restored = on_sides(weight_after_an_epoch, SIDES, gradient_accumulation_steps=2)
    assert theirs == restored == 1.5
    assert ours == 2.0


def test_number_of_micro_batches_below_1() -> None:
    """`gradient_accumulation_steps` below 1"""
    with SIDES[0].accelerator(gradient_accumulation_steps=-1) as accelerator:
        model = accelerator.prepare(nn.Linear(1, 1, bias=False))
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 1)).sum())
        assert accelerator.sync_gradients
        assert model.weight.grad.item() == -1.0
        accelerator.gradient_accumulation_steps = 0
        with pytest.raises(ZeroDivisionError), accelerator.accumulate(model):
            pass
    with SIDES[1].accelerator() as accelerator:
        for number in (0, -1):
            with pytest.raises(ValueError, match=f"gradient_accumulation_steps={number}: must be an integer"):
                accelerator.gradient_accumulation_steps = number


def test_second_accelerator() -> None:
    """`prepare` by a second Accelerator of a model that the first trains"""
    found: list[Any] = []
    for side in SIDES:
        with side.accelerator() as accelerator:
            given = nn.Linear(1, 1, bias=False)
            model, first = accelerator.prepare(given, torch.optim.SGD(given.parameters(), lr=1.0))
            second = side("accelerate.Accelerator")()
            again, stepped = second.prepare(model, torch.optim.SGD(given.parameters(), lr=1.0))
            before = given.weight.item()
            second.backward(again(torch.ones(1, 1)).sum())
            stepped.step()
            assert given.weight.item() == pytest.approx(before - 1.0)
            found.append(said(first.step))
    assert found[0] is None
    assert "prepare() of another Accelerator that took its model" in found[1]
    assert found[1] == found[2]


def test_unscale() -> None:
    """`unscale_gradients` under fp16"""
    for side in SIDES[1:]:
        with side.accelerator(mixed_precision="fp16") as accelerator:
            with pytest.raises(RuntimeError, match=r"unscaled by clip_grad_norm_"):
                accelerator.unscale_gradients()


def test_a_scaler_of_the_program() -> None:
    """`accelerator.scaler` set to an enabled GradScaler"""
    with SIDES[0].accelerator() as accelerator:
        model = accelerator.prepare(nn.Linear(1, 1, bias=False))
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        accelerator.backward(model(torch.ones(1, 1)).sum())
        assert model.weight.grad.item() == 4.0
    with (
        SIDES[1].accelerator() as accelerator,
        pytest.raises(ValueError, match=r"enabled=True.*pass GradScalerKwargs"),
    ):
        accelerator.scaler = torch.amp.GradScaler("cpu")


def test_dataclasses() -> None:
    """`send_to_device` of dataclasses"""
    found: list[str] = []
    for side in SIDES:
        with side.entered():
            sent = side("accelerate.utils.send_to_device")({"a": Sample(torch.ones(1))}, "meta")
        found.append(sent["a"].values.device.type)
    assert found == ["cpu", "meta", "cpu"]


def test_copies() -> None:
    """`deepcopy` of a prepared loader"""
    numbers: Any = range(3)
    theirs, ours, restored = on_sides(
        lambda each: said(lambda: len(copy.deepcopy(each.prepare(DataLoader(numbers))))), SIDES
    )
    assert theirs == 3
    assert ours == restored
    assert "copy the DataLoader and prepare() the copy" in ours


def logged(side: Side) -> Any:
    class Notes(side("accelerate.tracking.GeneralTracker")):
        name = "notes"
        requires_logging_directory = False

        def __init__(self) -> None:
            super().__init__()
            self.notes: list[Any] = []

        @property
        def tracker(self) -> Any:
            return self.notes

        def store_init_configuration(self, values: Any) -> None:
            self.notes.append(values)

        def log(self, values: Any, step: int | None = None) -> None:
            self.notes.append((step, values))

    own = Notes()
    with side.accelerator(log_with=own) as accelerator:
        before = list(accelerator.trackers)
        accelerator.init_trackers("project", {"lr": 1})
        accelerator.log({"loss": 1.0}, step=2)
        assert accelerator.get_tracker("notes", unwrap=True) is own.notes
        return before, [each is own for each in accelerator.trackers], own.notes


def test_trackers() -> None:
    """`accelerator.trackers`"""
    theirs, ours, restored = map(logged, SIDES)
    assert theirs == ours == restored == ([], [True], [{"lr": 1}, (2, {"loss": 1.0})])


def test_state() -> None:
    """`accelerator.state`"""
    names = [
        "num_processes",
        "process_index",
        "device",
        "mixed_precision",
        "is_main_process",
        "use_distributed",
    ]
    found: list[Any] = []
    for side in SIDES:
        with side.accelerator(mixed_precision="bf16") as accelerator:
            shared = side("accelerate.state.AcceleratorState")()
            found.append([getattr(accelerator.state, name) for name in names])
            assert [getattr(shared, name) for name in names] == found[-1]
            assert accelerator.state.distributed_type.value == "NO"
    assert found[0] == found[1] == found[2]


def test_split_batches_of_the_accelerator() -> None:
    """`Accelerator(split_batches=True)`"""
    found = on_sides(lambda accelerator: accelerator.split_batches, SIDES, split_batches=True)
    assert found == [False, True, True]
    for side in SIDES:
        kind = side("accelerate.utils.DataLoaderConfiguration")
        given = kind(even_batches=False)
        with side.accelerator(split_batches=True, dataloader_config=given) as accelerator:
            assert (given.split_batches, accelerator.even_batches) == (False, False)
            accelerator.dataloader_config = kind(split_batches=True)
            assert accelerator.prepare(DataLoader(range(4), batch_size=2)).total_batch_size == 2  # pyright: ignore[reportArgumentType]
            assert (accelerator.split_batches, accelerator.even_batches) == (True, True)


def test_scalars() -> None:
    """`gather_for_metrics` of a scalar on one process"""
    theirs, ours, restored = on_sides(
        lambda by: [by.gather_for_metrics(each) for each in (torch.tensor(2.0), 2.0)], SIDES
    )
    assert theirs[0].shape == restored[0].shape == ()
    assert theirs[1] == restored[1] == 2.0
    assert ours[0].tolist() == ours[1] == [2.0]


def weights_around_an_error(accelerator: Any) -> list[float]:
    found: list[float] = []
    model, optimizer = one_weight(accelerator)
    for place in range(6):
        with suppress(MemoryError), accelerator.accumulate(model):
            if place == 1:
                raise MemoryError
            accelerator.backward(-model(torch.ones(1, 1)).mean())
            optimizer.step()
            optimizer.zero_grad()
        found.append(model.weight.item())
    return found


def test_exceptions() -> None:
    """an exception that leaves `accumulate`, after which the loop goes on"""
    theirs, ours, restored = on_sides(weights_around_an_error, SIDES, gradient_accumulation_steps=2)
    assert theirs == [0, 0, 0, 1.5, 1.5, 2.5]
    assert ours == restored == [0, 0, 0, 1, 1, 2]


def test_zero_grad_first() -> None:
    """`zero_grad` before the `backward` of each micro-batch"""

    def train(accelerator: Any) -> float:
        model, optimizer = one_weight(accelerator)
        for _ in range(2):
            with accelerator.accumulate(model):
                optimizer.zero_grad()
                accelerator.backward(-model(torch.ones(1, 1)).mean())
                optimizer.step()
        return model.weight.item()

    assert on_sides(train, SIDES, gradient_accumulation_steps=2) == [0.5, 1, 1]


def test_clip_in_an_open_window() -> None:
    """`clip_grad_norm_` in an open window"""

    def train(accelerator: Any) -> list[float]:
        model, optimizer = one_weight(accelerator)
        norms: list[float] = []
        for _ in range(2):
            with accelerator.accumulate(model):
                accelerator.backward(-model(torch.ones(1, 1)).mean())
                norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.25).item())
                optimizer.step()
        return [*norms, model.weight.item()]

    found = on_sides(train, SIDES, gradient_accumulation_steps=2)
    assert found[0] == pytest.approx([0.5, 0.75, 0.25], rel=1e-4)
    assert found[1] == found[2] == pytest.approx([0.5, 1.0, 0.25], rel=1e-4)


def test_device_placement() -> None:
    """`device_placement=False`"""
    given = nn.Linear(1, 1, device="meta")
    found = on_sides(
        lambda by: said(lambda: by.prepare(given).weight.device.type), SIDES, device_placement=False
    )
    assert found[0] == "meta"
    assert all(each.startswith("ValueError") for each in found[1:]), found


def test_unpaired_losses() -> None:
    """`backward` of a model whose optimizer is not prepared, beside others that are"""
    for side in SIDES:
        with side.accelerator() as accelerator:
            one_weight(accelerator)
            alone = accelerator.prepare(nn.Linear(1, 1))
            told = said(lambda by=accelerator, model=alone: by.backward(model(torch.ones(1, 1)).mean()))
            assert (told is None) == (side is SIDES[0])
            assert told is None or "prepared" in told, told


def test_closures() -> None:
    """`step(closure)`, as LBFGS needs it"""
    for side in SIDES:
        with side.accelerator() as accelerator:
            given = nn.Linear(1, 1)
            model, optimizer = accelerator.prepare(given, torch.optim.LBFGS(given.parameters()))

            def closure(
                model: Any = model, optimizer: Any = optimizer, by: Any = accelerator
            ) -> torch.Tensor:
                optimizer.zero_grad()
                loss = model(torch.ones(1, 1)).square().mean()
                by.backward(loss)
                return loss

            told = said(lambda optimizer=optimizer, closure=closure: optimizer.step(closure))
            assert str(told).startswith("ValueError") == (side is not SIDES[0]), told


def test_foreign_parameters() -> None:
    """`clip_grad_norm_` of parameters that no prepared model has"""
    for side in SIDES:
        with side.accelerator() as accelerator:
            one_weight(accelerator)
            foreign = nn.Linear(1, 1, bias=False)
            foreign.weight.grad = torch.full((1, 1), 2.0)
            told = said(lambda by=accelerator, foreign=foreign: by.clip_grad_norm_(foreign.parameters(), 1.0))
            if side is SIDES[0]:
                assert told == 2
            else:
                assert "no prepared model" in told


def test_losses_of_several_elements() -> None:
    """`backward` of a loss with several elements, and its `gradient`"""
    ones = torch.ones(2, 1)

    def outcome(accelerator: Any) -> tuple[Any, Any, bool]:
        model, _ = one_weight(accelerator)
        told = said(lambda: accelerator.backward(model(ones), gradient=ones))
        alone = said(lambda: accelerator.backward(model(ones)))
        return told, alone, model.weight.grad is not None

    theirs, ours, restored = on_sides(outcome, SIDES)
    assert theirs[0] is None
    assert theirs[2]
    assert "grad can be implicitly created only for scalar outputs" in theirs[1]
    assert ours == restored
    assert "say the loss, of shape ()" in ours[0]
    assert "take its mean()" in ours[1]
    assert not ours[2]
