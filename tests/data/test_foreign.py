from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import DataLoader

from drivetrain_data import Shard, shard_loader


class Ready:
    """A loader of its own kind, such as one that decodes on a GPU."""

    def __init__(self, num_batches: int) -> None:
        self.dataset = range(2 * num_batches)
        self.num_batches = num_batches

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.tensor([2 * i, 2 * i + 1]) for i in range(self.num_batches))


class Doubling(DataLoader[int]):
    """A DataLoader that does something of its own with every batch."""

    def __iter__(self):
        return (2 * batch for batch in super().__iter__())


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("num_batches", [1, 2, 5, 6])
@pytest.mark.parametrize("even", ["uneven", "pad"])
def test_batches_are_dealt_out_in_turn(
    make_shards, read_together, count: int, num_batches: int, even: str
) -> None:
    shards = make_shards(lambda: Ready(num_batches), count, even=even)
    read = read_together(shards)
    assert read.samples == list(range(2 * num_batches))
    assert len(read.plans) == len(shards[0])
    assert read.plans[-1].is_last


def test_leftover_batches_can_be_dropped(make_shards, read_together) -> None:
    shards = make_shards(lambda: Ready(5), 2, even="drop")
    read = read_together(shards)
    assert read.samples == list(range(8))
    assert len(shards[0]) == 2
    assert read.plans[-1].is_last


def test_a_position_is_a_number_of_batches(make_shards, read_together) -> None:
    part = read_together(make_shards(lambda: Ready(7), 2), 1)
    shards = make_shards(lambda: Ready(7), 3)
    for shard in shards:
        shard.load_state_dict(part.states[-1])
    assert part.samples + read_together(shards).samples == list(range(14))


def test_what_a_loader_does_with_its_batches_is_kept(make_shards, read_together) -> None:
    shards = make_shards(lambda: Doubling(range(9), batch_size=2), 2)
    assert read_together(shards).samples == list(range(0, 18, 2))
    assert "the batches of Doubling, dealt out in turn" in shards[0].order_source


def test_batches_of_another_loader_are_not_split() -> None:
    with pytest.raises(ValueError, match="batches of Ready are dealt out whole"):
        shard_loader(Ready(3), Shard(0, 2), split_batches=True)
