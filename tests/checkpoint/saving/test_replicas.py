"""What ranks do not hold alike is not committed, and the error is the same on all ranks."""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from checkpoint.saves import save
from drivetrain_checkpoint import ChangedWhileCopiedError, Checkpointer, CheckpointSettings, Replicated
from drivetrain_checkpoint.saving.host_buffer import HostBuffer
from drivetrain_state import Context, connect

WAYS = {
    "at once": CheckpointSettings(),
    "copy": CheckpointSettings(background=True),
    "overlap": CheckpointSettings(background=True, staging="overlap"),
}


class DifferError(RuntimeError):
    """Ranks hold other weights."""


class Weights:
    """Replicas that tell which thread reads them."""

    def __init__(self, *tensors: Tensor, groups: Sequence[Sequence[int]] | None = None) -> None:
        self.tensors: Sequence[Tensor] = tensors
        self.groups = groups or [range(dist.get_world_size() if dist.is_initialized() else 1)]
        self.reader: threading.Thread | None = None
        self._sums: Tensor | None = None

    def sums(self) -> Tensor:
        if self._sums is None:
            self.reader = threading.current_thread()
            self._sums = torch.stack([tensor.sum().long() for tensor in self.tensors])
        return self._sums

    def explain(self, by_rank: Sequence[Sequence[int]]) -> str:
        return f"sums of ranks: {by_rank}"

    def refuse(self, told: str) -> NoReturn:
        raise DifferError(told)


def save_replicas(
    checkpointer: Checkpointer, step: int, weight: Tensor, groups: Sequence[Sequence[int]] | None = None
) -> Weights:
    state, replicas = {"weight": Replicated(weight)}, Weights(weight, groups=groups)
    save(checkpointer, step, state, changes_in_step=lambda _: True, replicas=replicas)
    return replicas


def saves(folder: Path, way: str) -> tuple[list[str], list[int]]:
    """Save what ranks hold alike, what they do not, and what is alike again."""
    with connect(device="cpu") as context:
        checkpointer = Checkpointer(context, folder, settings=WAYS[way])
        said: list[str] = []
        for step, drift in enumerate((0, context.topology.rank, 0)):
            weight = torch.full((1000,), float(step)) + drift
            try:
                save_replicas(checkpointer, step, weight)
                checkpointer.wait_for_copies()
                weight += context.topology.rank  # after the save: nothing of it
                checkpointer.wait()
                said.append("saved")
            except DifferError as error:
                said.append(str(error))
        torch.distributed.barrier()
        found = [int(path.name.removeprefix("step-")) for path in sorted(folder.glob("step-*"))]
        assert checkpointer.load().models["model"]["weight"].eq(2).all()
        checkpointer.close()
        return said, found


@pytest.mark.parametrize("way", WAYS)
def test_what_ranks_hold_otherwise_is_not_committed_and_all_ranks_say_the_same(
    way: str, run_ranks: Callable[..., list[object]], tmp_path: Path
) -> None:
    told = "sums of ranks: [[1000], [2000]]"
    assert run_ranks(saves, tmp_path, way) == [(["saved", told, "saved"], [0, 2])] * 2


def saves_in_groups(folder: Path) -> list[str]:
    """Save weights of which ranks 0 and 1 hold one part, and 2 and 3 another; then rank 3 differs from rank 2."""
    with connect(device="cpu") as context:
        checkpointer, rank = Checkpointer(context, folder), context.topology.rank
        said: list[str] = []
        for step, drift in enumerate((0, rank == 3)):
            try:
                save_replicas(
                    checkpointer, step, torch.full((10,), float(rank // 2 + drift)), [(0, 1), (2, 3)]
                )
                said.append("saved")
            except DifferError as error:
                said.append(str(error))
        checkpointer.close()
        return said


def test_ranks_of_one_group_hold_the_same_and_those_of_another_may_differ(
    run_ranks: Callable[..., list[object]], tmp_path: Path
) -> None:
    told = "sums of ranks: [[0], [0], [10], [20]]"
    assert run_ranks(saves_in_groups, tmp_path, num_processes=4) == [["saved", told]] * 4


@pytest.mark.parametrize("way", WAYS)
def test_the_thread_that_copies_reads_replicas(way: str, tmp_path: Path, context: Context) -> None:
    checkpointer = Checkpointer(context, tmp_path, settings=WAYS[way])
    replicas = save_replicas(checkpointer, 1, torch.ones(3))
    checkpointer.wait_for_copies()
    assert replicas.reader is not None
    assert (replicas.reader is threading.main_thread()) == (way != "overlap")
    checkpointer.close()


def test_a_rank_that_writes_nothing_still_waits_until_its_replicas_are_read() -> None:
    weight = torch.ones(3)
    copies, overlap = HostBuffer().stage([], (), Weights(weight))
    assert copies == []
    assert overlap is not None
    weight.mul_(2)
    with pytest.raises(ChangedWhileCopiedError, match=r"shape \(3,\) changed .* outside optimizer\.step"):
        overlap.run(lambda: None)
    overlap.wait()


def test_replicas_without_an_overlap_are_nothing_to_wait_for(tmp_path: Path, context: Context) -> None:
    checkpointer = Checkpointer(context, tmp_path, settings=WAYS["copy"])
    save_replicas(checkpointer, 1, torch.ones(3))
    assert not checkpointer.is_copying
    checkpointer.close()
