"""A rank without a sample of its own repeats one, and says so alike whoever reads."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from drivetrain import Accelerator
from plain_loop.case import own_rank

BATCHES = [[0], [1, 2, 3], [4]]


class Foreign:
    """A loader of another library."""

    dataset = range(5)

    def __iter__(self):
        return (torch.tensor(batch) for batch in BATCHES)


def loader_of(kind: str) -> Any:
    if kind == "foreign":
        return Foreign()
    if kind == "batches":
        return DataLoader(torch.arange(5), batch_sampler=BATCHES)  # pyright: ignore[reportArgumentType]
    return DataLoader(torch.arange(5), batch_size=2)  # pyright: ignore[reportArgumentType]


def replays(kind: str, data: dict[str, Any]) -> tuple[list[bool], list[tuple[int, ...]]]:
    """Whether each step repeats, and what counts in it; NaN losses of all that is repeated come into no weight."""
    accelerator = Accelerator(cpu=True, data=data)
    model = nn.Linear(1, 1)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), loader_of(kind)
    )
    plans = []
    for batch in loader:
        plans.append(loader.current)
        own = plans[-1].even or plans[-1].real_counts[accelerator.process_index] > 0
        loss = model(batch[:, None].float()).mean()
        accelerator.backward(loss if own else loss + float("nan"))
        optimizer.step()
        optimizer.zero_grad()
    assert all(value.isfinite().all() for value in accelerator.unwrap_model(model).parameters())
    return [plan.replayed for plan in plans], [plan.real_counts for plan in plans]


@pytest.mark.parametrize("even", ["uneven", "pad"])
@pytest.mark.parametrize(
    ("kind", "split"),
    [("batches", False), ("foreign", False), ("map", False), ("map", True)],
)
@pytest.mark.default_cases("map-True-pad", "foreign-False-uneven")
@pytest.mark.ranks(2)
def test_a_rank_that_repeats_says_so_whoever_reads(kind: str, split: bool, even: str) -> None:
    data = {"even": even, "split_batches": split}
    read, handed_out = (replays(kind, {**data, "dispatch": each}) for each in (False, True))
    assert read == handed_out
    # Padded or not, the last step's batches are equal: [4], and with padding [0] beside it.
    found, counts = read
    assert found == [of[own_rank()] == 0 and even != "pad" for of in counts]
