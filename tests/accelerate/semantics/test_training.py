"""Rows of the table "Where it differs" about accumulation, gradients and batches, on one process."""

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from accelerate_sides import SIDES, Side, said

pytest.importorskip("accelerate")


@dataclass
class Sample:
    values: torch.Tensor


def weight_after_an_epoch(side: Side) -> float:
    """Return the weight after windows of two micro-batches and of one, whose gradients are -1 for each sample."""
    with side.accelerator(gradient_accumulation_steps=2) as accelerator:
        given = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(given.weight)
        ones: Any = torch.ones(3, 1)
        model, optimizer, loader = accelerator.prepare(
            given, torch.optim.SGD(given.parameters(), lr=1.0), DataLoader(ones)
        )
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(-model(batch).mean())
                optimizer.step()
                optimizer.zero_grad()
        return given.weight.item()


def test_early_window() -> None:
    """a window of accumulation that closes early"""
    theirs, ours, restored = map(weight_after_an_epoch, SIDES)
    assert theirs == restored == 1.5
    assert ours == 2.0


def test_unscale() -> None:
    """`unscale_gradients` under fp16"""
    for side in SIDES[1:]:
        with side.accelerator(mixed_precision="fp16") as accelerator:
            with pytest.raises(RuntimeError, match=r"unscaled by clip_grad_norm_"):
                accelerator.unscale_gradients()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="scales no loss on the CPU")
def test_the_real_one_unscales() -> None:
    """`unscale_gradients` under fp16"""
    accelerator = SIDES[0]("accelerate.Accelerator")(mixed_precision="fp16")
    given = nn.Linear(1, 1, bias=False)
    model, optimizer = accelerator.prepare(given, torch.optim.SGD(given.parameters(), lr=1.0))
    accelerator.backward(model(torch.ones(1, 1, device="cuda")).mean())
    assert given.weight.grad is not None
    scaled = given.weight.grad.item()
    accelerator.unscale_gradients(optimizer)
    assert given.weight.grad.item() < scaled
    accelerator.end_training()


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
    found: list[Any] = []
    numbers: Any = range(3)
    for side in SIDES:
        with side.accelerator() as accelerator:
            loader = accelerator.prepare(DataLoader(numbers))
            found.append(said(lambda loader=loader: len(copy.deepcopy(loader))))
    theirs, ours, restored = found
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
    names = (
        "num_processes",
        "process_index",
        "device",
        "mixed_precision",
        "is_main_process",
        "use_distributed",
    )
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
    found: list[bool] = []
    for side in SIDES:
        with side.accelerator(split_batches=True) as accelerator:
            found.append(accelerator.split_batches)
    assert found == [False, True, True]


def test_scalars() -> None:
    """`gather_for_metrics` of a scalar on one process"""
    found: list[Any] = []
    for side in SIDES:
        with side.accelerator() as accelerator:
            found.append([accelerator.gather_for_metrics(each) for each in (torch.tensor(2.0), 2.0)])
    theirs, ours, restored = found
    assert theirs[0].shape == restored[0].shape == ()
    assert theirs[1] == restored[1] == 2.0
    assert ours[0].tolist() == ours[1] == [2.0]
