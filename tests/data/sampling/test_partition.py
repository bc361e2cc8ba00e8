from itertools import pairwise
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain_data import Partition, UnevenPolicy
from drivetrain_data.sampling.partition import balanced
from drivetrain_data.sampling.partition import num_steps as count_steps

evens = st.sampled_from(get_args(UnevenPolicy))


@st.composite
def partitions(draw: st.DrawFn, max_samples: int = 300, in_blocks: bool = False) -> Partition:
    num_blocks = draw(st.integers(1, 5)) if in_blocks else 1
    stop = draw(st.integers(num_blocks if in_blocks else 0, max_samples))
    return Partition(
        start=draw(st.integers(0, stop)),
        stop=stop,
        num_shards=num_blocks * draw(st.integers(1, 4 if in_blocks else 9)),
        batch_size=draw(st.integers(1, 7)),
        even=draw(evens),
        num_blocks=num_blocks,
    )


def layout(partition: Partition, step: int) -> list[list[int]]:
    return [partition.positions(step, shard).tolist() for shard in range(partition.num_shards)]


@given(partitions())
def test_real_samples_of_all_steps_are_the_rest_of_the_epoch_in_order(partition: Partition) -> None:
    real: list[int] = []
    for step in range(partition.num_steps):
        plan = partition.plan(step, 0)
        for held, count in zip(layout(partition, step), plan.real_counts, strict=True):
            real += held[:count]
    whole = list(range(partition.start, partition.stop))
    if partition.even == "drop":
        assert real == whole[: len(real)]
        assert len(whole) - len(real) < partition.stride
    else:
        assert real == whole


@given(partitions())
def test_a_plan_tells_what_shards_hold(partition: Partition) -> None:
    for step in range(partition.num_steps):
        held = [len(positions) for positions in layout(partition, step)]
        for shard in range(partition.num_shards):
            plan = partition.plan(step, shard)
            assert list(plan.sizes) == held
            assert plan.is_last == (step == partition.num_steps - 1)
            assert plan.replayed == (plan.real_counts[shard] == 0 and partition.even != "pad")
            assert plan.advance == sum(plan.real_counts)
            whole = plan.advance == partition.stride
            assert plan.even == (whole or partition.even == "pad")
            assert not plan.even or held == [partition.batch_size] * partition.num_shards


@given(partitions())
def test_a_tail_is_balanced_and_a_shard_without_samples_holds_one(partition: Partition) -> None:
    if partition.even != "uneven":
        return
    for step in range(partition.num_steps):
        counts = partition.plan(step, 0).real_counts
        assert max(counts) - min(counts) <= 1
        assert min(partition.plan(step, 0).sizes) >= 1


@given(partitions(in_blocks=True))
def test_shards_keep_to_their_block_and_what_all_have_read_is_a_prefix(partition: Partition) -> None:
    read: set[int] = set()
    end = partition.start
    for step in range(partition.num_steps):
        plan = partition.plan(step, 0)
        end += plan.advance
        held = layout(partition, step)
        assert tuple(map(len, held)) == plan.sizes
        for shard, (positions, count) in enumerate(zip(held, plan.real_counts, strict=True)):
            block = shard * partition.num_blocks // partition.num_shards
            assert {position % partition.num_blocks for position in positions} == {block}
            assert max(positions) < partition.stop
            assert positions[:count] == sorted(positions[:count])
            assert read.isdisjoint(positions[:count])
            read.update(positions[:count])
        assert read == set(range(partition.start, end))
        assert max(plan.real_counts) <= partition.batch_size
    if partition.even != "drop":
        assert read == set(range(partition.start, partition.stop))


@given(partitions(in_blocks=True))
def test_full_steps_are_laid_out_at_once_as_one_by_one(partition: Partition) -> None:
    for shard in range(partition.num_shards):
        together = partition.full_steps(0, partition.num_full_steps, shard).tolist()
        assert together == [layout(partition, step)[shard] for step in range(partition.num_full_steps)]


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 7), st.integers(0, 5)), max_size=6),
    st.integers(0, 300),
)
def test_any_chain_of_resumes_reads_every_position_once(chain: list[tuple[int, int, int]], stop: int) -> None:
    read: list[int] = []
    for num_shards, batch_size, num_steps in [*chain, (1, 1, stop)]:
        rest = Partition(
            start=len(read), stop=stop, num_shards=num_shards, batch_size=batch_size, even="uneven"
        )
        for step in range(min(num_steps, rest.num_steps)):
            counts = rest.plan(step, 0).real_counts
            for positions, count in zip(layout(rest, step), counts, strict=True):
                read += positions[:count]
    assert read == list(range(stop))


def test_ten_thousand_ranks_and_a_million_million_samples() -> None:
    stop, ranks, batch_size = 10**12, 10_000, 32
    saved = Partition(start=0, stop=stop, num_shards=ranks, batch_size=batch_size, even="uneven")
    assert saved.num_steps == 3_125_000
    position = 2_812_501 * saved.stride
    for new_ranks, new_size in [(10_000, 32), (7_777, 48), (1, 1), (12_288, 5)]:
        rest = Partition(start=position, stop=stop, num_shards=new_ranks, batch_size=new_size, even="uneven")
        assert rest.positions(0, 0)[0] == position
        for step in (0, rest.num_steps // 2, rest.num_full_steps - 1):
            for shard in (0, new_ranks // 3, new_ranks - 2):
                if shard >= 0 and shard + 1 < new_ranks:
                    assert rest.positions(step, shard)[-1] + 1 == rest.positions(step, shard + 1)[0]
            if step + 1 < rest.num_full_steps:
                assert rest.positions(step, new_ranks - 1)[-1] + 1 == rest.positions(step + 1, 0)[0]
        last = rest.start + (rest.num_steps - 1) * rest.stride
        assert sum(rest.plan(rest.num_steps - 1, 0).real_counts) == stop - last


@given(st.integers(0, 10**6), st.integers(1, 1000))
def test_balanced_slices_join(total: int, parts: int) -> None:
    slices = [balanced(total, parts, index) for index in range(parts)]
    assert slices[0][0] == 0
    assert slices[-1][1] == total
    assert all(one[1] == other[0] for one, other in pairwise(slices))


@pytest.mark.parametrize(("step", "shard"), [(2, 0), (-1, 0), (0, 2), (0, -1)])
def test_a_step_or_shard_that_is_not_there_is_refused(step: int, shard: int) -> None:
    partition = Partition(start=0, stop=8, num_shards=2, batch_size=2, even="uneven")
    with pytest.raises(IndexError, match=r"of 2 steps, 2 shards"):
        partition.positions(step, shard)


@given(partitions())
def test_steps_are_counted_without_a_partition(partition: Partition) -> None:
    left = partition.stop - partition.start
    assert count_steps(left, partition.stride, partition.even) == partition.num_steps
    assert count_steps(-1, partition.stride, partition.even) == 0
