"""A rank without a sample of its own repeats one, and says so alike whoever reads."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from drivetrain import Accelerator

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


def replays(kind: str, data: dict[str, Any]) -> tuple[list[bool], list[tuple[int, ...]], float]:
    """Whether each step repeats; what counts in it; and the weight after NaN losses of all that is repeated."""
    accelerator = Accelerator(cpu=True, data=data)
    model = nn.Linear(1, 1)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), loader_of(kind)
    )
    found: list[bool] = []
    counts: list[tuple[int, ...]] = []
    for batch in loader:
        plan = loader.current
        found.append(plan.replayed)
        counts.append(plan.real_counts)
        own = plan.even or plan.real_counts[accelerator.process_index] > 0
        loss = model(batch[:, None].float()).mean()
        accelerator.backward(loss if own else loss + float("nan"))
        optimizer.step()
        optimizer.zero_grad()
    return found, counts, next(iter(accelerator.unwrap_model(model).parameters())).item()


@pytest.mark.parametrize("even", ["uneven", "pad"])
@pytest.mark.parametrize(
    ("kind", "split"),
    [("batches", False), ("foreign", False), ("map", False), ("map", True)],
)
@pytest.mark.default_cases("map-True-pad", "foreign-False-uneven")
def test_a_rank_that_repeats_says_so_whoever_reads(run_ranks, kind: str, split: bool, even: str) -> None:
    data = {"even": even, "split_batches": split}
    read, handed_out = (run_ranks(replays, kind, {**data, "dispatch": each}) for each in (False, True))
    assert [rank[:2] for rank in read] == [rank[:2] for rank in handed_out]
    assert all(weight == weight for _, _, weight in [*read, *handed_out])  # no NaN has come through
    # Padded or not, the last step's batches are equal: [4], and with padding [0] beside it.
    for index, (found, counts, _) in enumerate(read):
        assert found == [of[index] == 0 and even != "pad" for of in counts]
