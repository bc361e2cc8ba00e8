from dataclasses import replace

import pytest

from drivetrain_data import Shard
from drivetrain_data.sampling.sharding import DataSharding

SHARDING = DataSharding(
    shard=Shard(1, 3), even="uneven", split=False, strategy="interleaved", num_blocks=1, seed=0, for_all=False
)


def test_a_rank_reads_its_own_batch_or_all_that_have_samples_of_their_own() -> None:
    assert list(SHARDING.readers((2, 1, 0))) == [1]
    assert list(replace(SHARDING, for_all=True).readers((2, 1, 0))) == [0, 1]
    assert list(replace(SHARDING, for_all=True, even="pad").readers((2, 1, 0))) == [0, 1, 2]


def test_one_of_the_ranks_that_read_warns() -> None:
    assert not SHARDING.is_first_reader
    assert replace(SHARDING, shard=Shard(0, 3)).is_first_reader
    assert replace(SHARDING, for_all=True).is_first_reader


def test_a_function_is_refused_by_its_name() -> None:
    def striped(position: int, shard: Shard) -> int:
        return position * shard.count + shard.index

    with pytest.raises(ValueError, match="strategy=striped: a stream; leave it out"):
        replace(SHARDING, strategy=striped).check_interleaved("a stream")
    SHARDING.check_interleaved("a stream")
