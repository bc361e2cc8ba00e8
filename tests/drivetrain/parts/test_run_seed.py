"""What each rank draws while it trains."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

from drivetrain import Accelerator, ParallelDims


class Augmented(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index), torch.rand(()).item(), random.random(), float(np.random.rand())])


def drawn(num_workers: int = 0, folder: Path | None = None, **options: Any) -> dict[str, Any]:
    """What an epoch draws; with a folder, the rest of it after a resume too."""
    accelerator = Accelerator(cpu=True, project_dir=folder, **options)
    before = torch.rand(2).tolist()
    found: dict[str, Any] = {"before": before, "samples": [], "masks": [], "decisions": []}
    model: Any = None
    if folder is not None:
        linear = nn.Linear(4, 1)
        model, optimizer = accelerator.prepare(linear, torch.optim.SGD(linear.parameters(), lr=0.1))
    loader = accelerator.prepare(DataLoader(Augmented(), batch_size=2, num_workers=num_workers))

    def step(batch: torch.Tensor) -> None:
        found["samples"].append(batch.tolist())
        found["masks"].append(nn.functional.dropout(torch.ones(64)).tolist())
        found["decisions"].append([random.random(), float(np.random.rand())])
        if model is not None:
            accelerator.backward(model(batch).mean())
            optimizer.step()
            optimizer.zero_grad()

    for number, batch in enumerate(loader):
        step(batch)
        if folder is not None and number == 1:
            accelerator.save_state()
    if folder is not None:
        whole = {name: found[name][2:] for name in ("samples", "masks", "decisions")}
        found.update(samples=[], masks=[], decisions=[])
        accelerator.load_state()
        for batch in loader:
            step(batch)
        assert whole == {name: found[name] for name in whole}
    accelerator.end_training()
    return found


def test_each_rank_draws_for_what_it_reads_with_any_number_of_workers(run_ranks) -> None:
    first, second = run_ranks(seeded)
    assert first["before"] == second["before"]
    assert first["decisions"] == second["decisions"]  # a program decides by them what every rank does
    for one, other in zip(first["masks"], second["masks"], strict=True):
        assert one != other
    for one, other in zip(first["samples"], second["samples"], strict=True):
        assert not {value for row in one for value in row} & {value for row in other for value in row}
    assert run_ranks(seeded, 1) == [first, second]


def seeded(num_workers: int = 0) -> dict[str, Any]:
    return drawn(num_workers, seed=5)


@pytest.mark.ranks(2)
def test_a_resume_goes_on_with_each_ranks_draws(tmp_path: Path) -> None:
    masks: list[Any] = [None, None]
    dist.all_gather_object(masks, drawn(folder=tmp_path, seed=5)["masks"])
    assert masks[0][0] != masks[1][0]


@pytest.mark.ranks(2)
def test_ranks_of_one_shard_draw_the_same() -> None:
    found: list[Any] = [None, None]
    dist.all_gather_object(found, drawn(seed=5, parallelism=ParallelDims(tensor=2)))
    assert found[0] == found[1]


@pytest.mark.ranks(2)
def test_what_a_program_seeds_itself_is_left_alone() -> None:
    accelerator = Accelerator(cpu=True, seed=5)
    loader = accelerator.prepare(DataLoader(torch.arange(8), batch_size=2))
    torch.manual_seed(7)
    for _ in loader:
        pass
    assert torch.initial_seed() == 7


def saved_alone(folder: Path) -> None:
    accelerator = Accelerator(cpu=True, project_dir=folder, seed=5)
    accelerator.prepare(nn.Linear(4, 1))
    accelerator.save_state()
    accelerator.end_training()


def drawn_after_a_resume(folder: Path, tensor: int) -> tuple[float, float, float]:
    accelerator = Accelerator(cpu=True, project_dir=folder, seed=5, parallelism=ParallelDims(tensor=tensor))
    accelerator.prepare(nn.Linear(4, 1))
    accelerator.load_state()
    drawn = torch.rand(()).item(), random.random(), float(np.random.rand())
    accelerator.end_training()
    return drawn


def test_a_resume_on_another_number_of_ranks_draws_by_shard(run_ranks, tmp_path: Path) -> None:
    run_ranks(saved_alone, tmp_path, num_processes=1)
    first, second = run_ranks(drawn_after_a_resume, tmp_path, 1)
    assert first[0] != second[0]
    assert first[1:] == second[1:], "a program decides by them what every rank does"
    one, other = run_ranks(drawn_after_a_resume, tmp_path, 2)
    assert one == other == first
