from typing import Any

import pytest

from drivetrain_data import Shard


def test_a_shard_is_one_of_several() -> None:
    assert Shard(1, 4) == Shard(index=1, count=4)


@pytest.mark.parametrize("count", [0, -2])
def test_no_shards_are_refused(count: int) -> None:
    with pytest.raises(ValueError, match=f"count={count}: data is divided among at least 1 shard"):
        Shard(0, count)


@pytest.mark.parametrize("index", [-1, 4])
def test_an_index_out_of_range_is_refused(index: int) -> None:
    with pytest.raises(ValueError, match=rf"index={index}: with count=4 the shards are 0 to 3"):
        Shard(index, 4)


@pytest.mark.parametrize(("index", "count"), [(0, 2.0), ("0", 2), (True, 2), (0.5, 2), (None, 2)])
def test_what_is_no_integer_is_refused(index: Any, count: Any) -> None:
    with pytest.raises(TypeError, match="must be an integer, such as a rank or a number of ranks"):
        Shard(index, count)
