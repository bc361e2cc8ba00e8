"""Saves in the background whose copies are made while training goes on."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from checkpoint.saves import save, saves_held_back
from drivetrain_checkpoint import ChangedWhileCopiedError, Checkpointer, CheckpointSettings
from drivetrain_checkpoint.saving.host_buffer import HostBuffer, Overlap
from drivetrain_state import Context

OVERLAP = CheckpointSettings(background=True, staging="overlap", stall_seconds=60)
NUM = 1_000_000


def save_both(checkpointer: Checkpointer, step: int, weight: Tensor, buffer: Tensor) -> Path:
    return save(
        checkpointer,
        step,
        {"weight": weight, "buffer": buffer},
        replicated={"training": {"state": weight * 2}},
        changes_in_step=lambda name: name in ("models/model/weight", "replicated/training/state"),
    )


def parts_of(tensors: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    return list(zip(HostBuffer().allocate_like(tensors), tensors, strict=True))


def test_what_changes_after_the_copies_is_not_saved_and_buffers_may_change_at_once(
    tmp_path: Path, context: Context
) -> None:
    checkpointer = Checkpointer(context, tmp_path, settings=OVERLAP)
    weight, buffer = torch.zeros(NUM), torch.zeros(NUM)
    for step in (1, 2, 3):
        weight.fill_(step)
        buffer.fill_(-step)
        save_both(checkpointer, step, weight, buffer)
        assert checkpointer.is_copying
        buffer.fill_(7)
        checkpointer.wait_for_copies()
        assert not checkpointer.is_copying
        weight.fill_(8)
    checkpointer.wait()
    for step in (1, 2, 3):
        loaded = checkpointer.load(tmp_path / f"step-{step}")
        assert loaded.models["model"]["weight"].eq(step).all()
        assert loaded.models["model"]["buffer"].eq(-step).all()
        assert loaded.replicated["training"]["state"].eq(2 * step).all()
    checkpointer.close()


def test_nothing_is_left_to_copy_where_nothing_is_named_or_the_setting_says_so(
    tmp_path: Path, context: Context
) -> None:
    weight = torch.ones(NUM)
    for settings, named in ((OVERLAP, None), (CheckpointSettings(background=True), lambda _: True)):
        checkpointer = Checkpointer(context, tmp_path, settings=settings)
        save(checkpointer, 1, {"weight": weight}, changes_in_step=named)
        assert not checkpointer.is_copying
        weight.fill_(2)
        assert checkpointer.load().models["model"]["weight"].eq(1).all()
        weight.fill_(1)
        checkpointer.close()


def in_place(tensor: Tensor) -> None:
    tensor.mul_(2)


def past_the_version(tensor: Tensor) -> None:
    tensor.data.mul_(2)


def by_numpy(tensor: Tensor) -> None:
    tensor.numpy()[:] = 3


@pytest.mark.parametrize("change", [in_place, past_the_version, by_numpy])
def test_a_weight_that_changes_before_it_is_copied_is_an_error(change: Callable[[Tensor], None]) -> None:
    tensors = [torch.rand(100), torch.rand(3, 5)]
    overlap = Overlap(parts_of(tensors))
    change(tensors[1])
    with pytest.raises(ChangedWhileCopiedError, match=r"shape \(3, 5\) changed .* outside optimizer\.step"):
        overlap.run(lambda: None)
    overlap.wait()


def test_values_without_an_order_are_no_change() -> None:
    tensors = [torch.full((9,), torch.nan), torch.empty(0), torch.tensor(3), torch.rand(4, 4).t()]
    parts = parts_of(tensors)
    Overlap(parts).run(lambda: None)
    copies = [copy for copy, _ in parts]
    assert copies[0].isnan().all()
    assert [copy.tolist() for copy in copies[1:]] == [tensor.tolist() for tensor in tensors[1:]]


def test_whoever_waits_for_copies_goes_on_when_they_fail() -> None:
    tensors = [torch.rand(10), torch.rand(10)]
    overlap = Overlap(parts_of(tensors))
    waited = threading.Thread(target=overlap.wait)
    waited.start()

    def fail() -> None:
        raise OSError("the thread ends here")

    with pytest.raises(OSError, match="the thread ends here"):
        overlap.run(fail)
    waited.join(60)
    assert not waited.is_alive()


def test_a_breach_is_raised_by_the_next_call_and_nothing_is_committed(
    tmp_path: Path, context: Context, caplog: Any
) -> None:
    checkpointer = Checkpointer(context, tmp_path, settings=OVERLAP)
    weight, buffer = torch.ones(NUM), torch.ones(1)
    save_both(checkpointer, 1, weight, buffer)
    checkpointer.wait()
    with saves_held_back():
        save_both(checkpointer, 2, weight, buffer)
        weight.zero_()
    with pytest.raises(ChangedWhileCopiedError, match="staging='copy'"):
        checkpointer.wait()
    assert "the save of step 2 failed in the background" in caplog.text
    assert checkpointer.load().step == 1
    save_both(checkpointer, 3, weight, buffer)
    assert checkpointer.load().step == 3
    checkpointer.close()


def test_nobody_waits_for_a_save_whose_thread_could_not_start(tmp_path: Path, context: Context) -> None:
    checkpointer = Checkpointer(context, tmp_path, settings=OVERLAP)
    weight, buffer = torch.ones(NUM), torch.ones(1)
    threading.stack_size(2**46)  # more than there are addresses for
    try:
        with pytest.raises(RuntimeError, match="can't start new thread"):
            save_both(checkpointer, 1, weight, buffer)
    finally:
        threading.stack_size(0)
    assert not checkpointer.is_copying
    checkpointer.wait_for_copies()
    assert checkpointer.wait() is None
    save_both(checkpointer, 2, weight, buffer)
    assert checkpointer.load().step == 2
    checkpointer.close()


def test_an_unknown_staging_is_refused() -> None:
    with pytest.raises(ValueError, match="staging='later': must be one of copy, overlap"):
        CheckpointSettings(staging="later")  # pyright: ignore[reportArgumentType]
