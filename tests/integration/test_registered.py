"""Registered objects on several ranks: one state for all, or one for each."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.swa_utils import AveragedModel

from logged_messages import messages_of
from plain_loop.accelerated import accelerator_of
from registered import Kept


class Merged(Kept):
    """A number on each rank; of another number of ranks, the sum."""

    def load_state_dicts(self, state_dicts: Sequence[Mapping[str, int]]) -> None:
        self.value = sum(state["value"] for state in state_dicts)


def save(folder: str) -> None:
    with accelerator_of(project_dir=folder) as accelerator:
        accelerator.prepare(nn.Linear(1, 1))
        rank = accelerator.process_index
        accelerator.register_for_checkpointing(Kept(10 + rank), per_rank=True)
        accelerator.register_for_checkpointing(Merged(100 + rank), per_rank=True)
        accelerator.register_for_checkpointing(shared=Kept(7))
        accelerator.save_state()


def load(folder: str) -> tuple[int, int, int]:
    with accelerator_of(project_dir=folder) as accelerator:
        accelerator.prepare(nn.Linear(1, 1))
        own, merged, shared = Kept(), Merged(), Kept()
        accelerator.register_for_checkpointing(own, merged, per_rank=True)
        accelerator.register_for_checkpointing(shared=shared)
        accelerator.load_state()
        return own.value, merged.value, shared.value


def test_each_rank_gets_its_own_state_back(run_ranks, tmp_path: Path) -> None:
    run_ranks(save, str(tmp_path))
    assert run_ranks(load, str(tmp_path)) == [(10, 100, 7), (11, 101, 7)]
    with pytest.raises(
        ValueError, match=r"objects \['object_0'\] have a state .* each of the 2 ranks .* 1 now"
    ):
        load(str(tmp_path))
    with accelerator_of(project_dir=tmp_path) as accelerator:
        accelerator.prepare(nn.Linear(1, 1))
        accelerator.register_for_checkpointing(Merged(), Merged(), shared=Kept())
        with pytest.raises(ValueError, match="the checkpoint holds registered objects"):
            accelerator.load_state()


def save_merged(folder: str) -> None:
    with accelerator_of(project_dir=folder) as accelerator:
        accelerator.prepare(nn.Linear(1, 1))
        accelerator.register_for_checkpointing(sum=Merged(1 + accelerator.process_index), per_rank=True)
        accelerator.save_state()


def test_an_object_that_merges_is_taken_up_at_another_number_of_ranks(run_ranks, tmp_path: Path) -> None:
    run_ranks(save_merged, str(tmp_path))
    with accelerator_of(project_dir=tmp_path) as accelerator:
        accelerator.prepare(nn.Linear(1, 1))
        found = Merged()
        accelerator.register_for_checkpointing(sum=found, per_rank=True)
        accelerator.load_state()
        assert found.value == 3


@pytest.mark.ranks(2)
def test_a_state_that_differs_between_ranks_is_told_once_by_the_first(tmp_path: Path) -> None:
    with (
        messages_of("drivetrain.saving.registered") as told,
        accelerator_of(project_dir=tmp_path) as accelerator,
    ):
        model = nn.Linear(40, 40)
        model, _ = accelerator.prepare(model, SGD(model.parameters()))
        rank = accelerator.process_index
        average = AveragedModel(accelerator.unwrap_model(model))
        accelerator.register_for_checkpointing(average=average, same=Kept(1), seen=Kept(rank))
        accelerator.register_for_checkpointing(fine=Kept(rank), per_rank=True)
        accelerator.save_state()
        accelerator.save_state()  # told once
        with torch.no_grad():
            average.module.weight.add_(rank)
        accelerator.save_state()
    assert len(told) == (0 if rank else 2)
    if not rank:
        assert "'seen' (Kept) differs on ranks [1] from that of rank 0" in told[0]
        assert "per_rank=True" in told[0]
        assert "'average' (AveragedModel) differs on ranks [1]" in told[1]


def test_per_rank_is_no_name() -> None:
    with pytest.raises(TypeError, match=r"per_rank=.*: must be True or False"):
        accelerator_of().register_for_checkpointing(per_rank=Kept())


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("per_rank", "said"),
    [
        (False, r"\(rank 0: object_0; rank 1: none\)"),
        (True, r"\(rank 0: object_0 \(per_rank\); rank 1: none\)"),
    ],
)
def test_what_is_registered_on_one_rank_alone_is_refused_on_all(
    tmp_path: Path, per_rank: bool, said: str
) -> None:
    with accelerator_of(project_dir=tmp_path) as accelerator:
        accelerator.prepare(nn.Linear(1, 1))
        if accelerator.is_main_process:
            accelerator.register_for_checkpointing(Kept(1), per_rank=per_rank)
        with pytest.raises(RuntimeError, match="call it on all ranks") as caught:
            accelerator.save_state()
        assert re.search(said, str(caught.value))
