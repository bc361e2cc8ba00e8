"""Orders that keep to storage, by themselves and through loaders of every strategy."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, WeightedRandomSampler
from torch.utils.data.datapipes.iter import IterableWrapper

from drivetrain_data import (
    DataStateError,
    IndexRangeError,
    Permutation,
    PermutationSampler,
    Shard,
    shard_loader,
)
from drivetrain_data.sampling.block_shuffle import BlockOrder, BlockShuffledOrder

reused = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
# (shards, batch size on each, steps before the interruption)
runs = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 5), st.integers(0, 6)), min_size=1, max_size=5)


def whole(order, epoch: int = 0) -> list[int]:
    return order.take(epoch, np.arange(order.length(epoch)))


def striped(position: int, shard: Shard) -> int:
    return position * shard.count + shard.index


class Striped:
    """The same rule, with its inverse."""

    def __call__(self, position: int, shard: Shard) -> int:
        return striped(position, shard)

    def inverse(self, index: int, num_shards: int) -> tuple[int, int]:
        return divmod(index, num_shards)


@given(
    size=st.integers(6, 300), num_blocks=st.integers(1, 6), shuffled=st.booleans(), epoch=st.integers(0, 3)
)
def test_each_block_is_contiguous_and_given_whole(size, num_blocks, shuffled, epoch) -> None:
    order = BlockOrder(size, num_blocks, seed=1, shuffled=shuffled)
    taken = whole(order, epoch)
    assert sorted(taken) == list(range(size))
    blocks = [taken[block::num_blocks] for block in range(num_blocks)]
    start = 0
    for block in blocks:
        assert sorted(block) == list(range(start, start + len(block)))
        assert shuffled or block == sorted(block)
        start += len(block)
    assert max(map(len, blocks)) - min(map(len, blocks)) <= 1


@given(size=st.integers(0, 300), block_size=st.integers(1, 40), epoch=st.integers(0, 3))
def test_shuffled_runs_stay_together(size: int, block_size: int, epoch: int) -> None:
    taken = whole(BlockShuffledOrder(size, block_size, seed=5), epoch)
    assert sorted(taken) == list(range(size))
    blocks = [index // block_size for index in taken]
    assert sum(one != other for one, other in pairwise(blocks)) == max(0, len(set(blocks)) - 1)


def test_runs_their_insides_and_the_place_of_the_short_one_change_with_the_epoch() -> None:
    order = BlockShuffledOrder(23, 5, seed=0)
    epochs = [whole(order, epoch) for epoch in range(40)]
    assert len({tuple(taken) for taken in epochs}) == 40
    places = {min(taken.index(index) for index in (20, 21, 22)) for taken in epochs}
    assert places == {0, 5, 10, 15, 20}


def test_published_block_orders_never_change() -> None:
    runs_of_4 = BlockShuffledOrder(12, 4, seed=7)
    assert whole(runs_of_4, 2) == [2, 0, 1, 3, 4, 5, 7, 6, 8, 11, 9, 10]
    assert runs_of_4.name == "shuffled in blocks of 4/1"
    blocks = BlockOrder(11, 2, seed=7, shuffled=True)
    assert whole(blocks, 2) == [0, 6, 4, 9, 5, 8, 1, 7, 3, 10, 2]
    assert blocks.name == "blocks, shuffled/1"


def test_a_sampler_gives_the_runs_and_a_loader_shards_them(make_shards, read_together) -> None:
    alone = list(PermutationSampler(20, seed=3, block_size=6))
    assert alone == whole(BlockShuffledOrder(20, 6, seed=3))

    def build() -> DataLoader[Any]:
        return DataLoader(
            torch.arange(20), batch_size=3, sampler=PermutationSampler(20, seed=3, block_size=6)
        )

    assert read_together(make_shards(build, 2, seed=3)).samples == alone
    with pytest.raises(ValueError, match="block_size=0: a block holds at least 1 sample"):
        PermutationSampler(20, block_size=0)


@pytest.mark.parametrize("strategy", ["block", "node", Striped()])
@pytest.mark.parametrize("shuffle", [False, True])
@reused
@given(
    length=st.integers(6, 120), chain=runs, epoch=st.integers(0, 2), even=st.sampled_from(["uneven", "pad"])
)
@pytest.mark.default_cases("True-node", "False-block")
def test_any_chain_of_interruptions_gives_every_sample_once(
    read_in_runs, strategy, shuffle, length, chain, epoch, even
) -> None:
    read = read_in_runs(
        lambda size: DataLoader(torch.arange(length), batch_size=size, shuffle=shuffle),
        chain,
        length,
        epoch,
        lambda count: {"strategy": strategy, "even": even, "num_nodes": 2 if count % 2 == 0 else 1},
    )
    assert sorted(read) == list(range(length))


def pairs(length: int) -> Any:
    return lambda: DataLoader(torch.arange(length), batch_size=2)


def test_after_another_number_of_shards_the_next_epoch_has_blocks_of_its_own(
    make_shards, read_together, caplog
) -> None:
    first = read_together(make_shards(pairs(24), 4, strategy="block"), 1)
    assert first.held == [[[0, 1], [6, 7], [12, 13], [18, 19]]]
    assert first.states[0]["extra"] == {"num_blocks": 4}
    shards = make_shards(pairs(24), 3, first.states[0], strategy="block")
    assert [shard.state_dict() for shard in shards] == first.states * 3
    assert "epoch 0 was begun with 4 blocks of the data, and there are 3 now" in caplog.text
    rest = read_together(shards)
    assert sorted(first.samples + rest.samples) == list(range(24))
    assert read_together(shards, 1).held == [[[0, 1], [8, 9], [16, 17]]]


def test_shards_of_a_node_take_turns_in_its_block(make_shards, read_together) -> None:
    shards = make_shards(pairs(16), 4, strategy="node", num_nodes=2)
    assert read_together(shards).held == [
        [[0, 1], [2, 3], [8, 9], [10, 11]],
        [[4, 5], [6, 7], [12, 13], [14, 15]],
    ]
    assert shards[0].order_source == "2 contiguous blocks, in sequence"


def test_a_function_says_who_reads_what(make_shards, read_together) -> None:
    part = read_together(make_shards(pairs(8), 2, strategy=striped), 1)
    assert part.held == [[[0, 2], [1, 3]]]
    again = make_shards(lambda: DataLoader(torch.arange(8)), 2, part.states[0], strategy=striped)
    assert read_together(again).samples == [4, 5, 6, 7]
    with pytest.raises(DataStateError, match=r"2 shards read by striped, and here are 1: .*inverse\(index"):
        make_shards(pairs(8), 1, part.states[0], strategy=striped)


def test_a_function_or_inverse_that_is_wrong_is_refused(make_shards, read_together) -> None:
    class Wrong(Striped):
        def inverse(self, index: int, num_shards: int) -> tuple[int, int]:
            return index // num_shards, 0

    part = read_together(make_shards(pairs(8), 2, strategy=Wrong()), 1)
    (alone,) = make_shards(pairs(8), 1, part.states[0], strategy=Wrong())
    with pytest.raises(IndexRangeError, match="its inverse says position 2 of shard 0: one of them is wrong"):
        next(iter(alone))
    with pytest.raises(IndexRangeError, match=r"gave index 8 for position 3 of shard 0 of 1.*8 samples"):
        make_shards(pairs(8), 1, strategy=lambda position, shard: position + 5)


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda p, s: p, "sample 0 twice, for position 0 of shard 0 and for position 0 of shard 1"),
        (lambda p, s: 0, "sample 0 twice, for position 0 of shard 0 and for position 1 of shard 0"),
        (lambda p, s: None, "gave None for position 0 of shard 0 of 2: must be a whole number"),
    ],
)
@pytest.mark.parametrize("size", [9, 2**20 + 9])
def test_a_function_that_gives_samples_twice_is_refused(make_shards, function, says: str, size: int) -> None:
    if size > 9:
        says = says.replace("position 1 of", "position 16 of")
    with pytest.raises(ValueError, match=says):
        make_shards(lambda: DataLoader(range(size)), 2, strategy=function)


@pytest.mark.parametrize("size", [1, 7, 9, 2**20 + 9])
def test_a_function_that_gives_every_sample_once_passes(make_shards, size: int) -> None:
    batch_size = 2 if size < 10 else 2**16
    shards = make_shards(
        lambda: DataLoader(range(size), batch_size=batch_size), min(size, 4), strategy=striped
    )
    read = torch.cat([batch for shard in shards for batch in shard])
    assert torch.equal(read.unique(), torch.arange(size))


def test_another_function_of_the_same_name_is_refused(make_shards, read_together) -> None:
    (state,) = read_together(make_shards(pairs(8), 2, strategy=lambda p, s: striped(p, s)), 1).states
    make_shards(pairs(8), 2, state, strategy=lambda p, s: p * 2 + s.index)
    with pytest.raises(DataStateError, match="read by another function than <lambda>, or by one that gave"):
        make_shards(pairs(8), 2, state, strategy=lambda p, s: s.index * 4 + p)


def test_a_shuffled_block_is_shuffled_before_the_function_is_asked(make_shards, read_together) -> None:
    shards = make_shards(lambda: DataLoader(torch.arange(8), batch_size=4, shuffle=True), 2, strategy=striped)
    (step,) = read_together(shards).held
    for index, batch in enumerate(step):
        assert batch == [position * 2 + index for position in Permutation(4, 0, 0, index).at(np.arange(4))]


@pytest.mark.parametrize(
    ("data", "arguments", "strategy", "says"),
    [
        (range(4), {}, "diagonal", "must be one of interleaved, block, node"),
        (range(1), {}, "block", "strategy='block': 1 samples are fewer than 2 blocks"),
        (range(4), {}, "node", "2 shards over num_nodes=4"),
        (IterableWrapper([0]), {}, "block", "an iterable dataset is distributed in turn"),
        (range(4), {"batch_sampler": [[0, 1]]}, "block", "the batches of list are distributed whole"),
        (range(4), {"sampler": WeightedRandomSampler([1.0], 4)}, "block", "Sampler asks for another order"),
    ],
)
def test_what_cannot_be_read_in_blocks_is_refused(data: Any, arguments: Any, strategy: Any, says) -> None:
    with pytest.raises(ValueError, match=says):
        shard_loader(DataLoader(data, **arguments), Shard(0, 2), strategy=strategy, num_nodes=4)
