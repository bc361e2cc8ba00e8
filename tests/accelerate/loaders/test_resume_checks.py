"""Programs that count batches by themselves, and skip them after a resume or pass over them in a loop."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from accelerate_resumed_loops import trained_after_resume
from accelerate_sides import OURS
from drivetrain_data import DataStateError


def prepared(accelerator: Any, batch_size: int) -> tuple[Any, Any]:
    given, samples = nn.Linear(1, 1), torch.arange(24.0).view(-1, 1)
    loader: Any = DataLoader(samples, batch_size=batch_size)  # pyright: ignore[reportArgumentType]
    _, optimizer, loader = accelerator.prepare(given, torch.optim.SGD(given.parameters()), loader)
    return optimizer, loader


def state_after(num_batches: int, *, batch_size: int = 4, epoch: int = 0) -> dict[str, Any]:
    with OURS.accelerator() as accelerator:
        optimizer, loader = prepared(accelerator, batch_size)
        loader.set_epoch(epoch)
        for number, _ in enumerate(loader, start=1):
            if number == num_batches:
                return optimizer.state_dict()
    raise AssertionError("the loader is shorter")


def first_after(state: dict[str, Any], num_skipped: int, *, batch_size: int) -> float:
    with OURS.accelerator() as accelerator:
        optimizer, loader = prepared(accelerator, batch_size)
        optimizer.load_state_dict(state)
        return next(iter(accelerator.skip_first_batches(loader, num_skipped)))[0].item()


def test_batches_of_another_size_have_to_be_those_that_were_read() -> None:
    state = state_after(3)
    assert first_after(state, 6, batch_size=2) == 12
    with pytest.raises(DataStateError) as caught:
        first_after(state, 3, batch_size=2)
    assert str(caught.value).startswith(
        "skip_first_batches(3) leaves out 6 samples, 2 in each batch of all processes, but 12 of the epoch had been "
        "read when the optimizer's state was saved, 4 in each batch"
    )


def test_batches_of_the_same_size_are_counted_by_the_program() -> None:
    state = state_after(3)
    for num_skipped in (2, 3, 4):
        assert first_after(state, num_skipped, batch_size=4) == num_skipped * 4


def test_a_state_is_compared_once() -> None:
    state = state_after(3)
    with OURS.accelerator() as accelerator:
        optimizer, loader = prepared(accelerator, 2)
        optimizer.load_state_dict(state)
        loader.set_epoch(0)
        assert next(iter(accelerator.skip_first_batches(loader, 1)))[0] == 2


def test_an_epoch_that_was_counted_in_other_steps_is_told(caplog: pytest.LogCaptureFixture) -> None:
    state = state_after(6, epoch=1)
    for epoch, is_told in ((0, True), (1, False), (2, False), (3, True)):
        with OURS.accelerator() as accelerator, caplog.at_level(logging.WARNING):
            optimizer, loader = prepared(accelerator, 2)
            optimizer.load_state_dict(state)
            loader.set_epoch(epoch)
        assert ("the optimizer's state was saved in epoch 1" in caplog.text) is is_told, epoch
        caplog.clear()


def test_a_state_saved_outside_a_loop_says_nothing_of_data() -> None:
    with OURS.accelerator() as accelerator:
        optimizer, _ = prepared(accelerator, 2)
        assert sorted(optimizer.state_dict()) == ["param_groups", "state"]


@pytest.mark.parametrize("skip", [0, 1, 2])
@pytest.mark.default_cases("1")
def test_a_loop_that_passes_over_others_goes_on(tmp_path: Path, skip: int) -> None:
    found = trained_after_resume(OURS, tmp_path, num_batches=6, skip=skip, num_epochs=2)
    assert found == [*range(3 + skip, 6), *range(6)]


@pytest.mark.parametrize("num_batches", [5, 6, 7])
@pytest.mark.default_cases("6")
def test_what_would_train_nothing_is_an_error_however_little_is_left(
    tmp_path: Path, num_batches: int
) -> None:
    said = r"passed over before the first backward.*Leave out the program's own"
    with pytest.raises(DataStateError, match=said):
        trained_after_resume(OURS, tmp_path, num_batches=num_batches, skip=3, num_epochs=2)


def test_a_loop_that_trains_may_pass_over_later_ones(tmp_path: Path) -> None:
    assert trained_after_resume(OURS, tmp_path, num_batches=12, skip=0)[-1] == 11
