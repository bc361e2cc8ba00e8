from typing import Any

import pytest

from drivetrain_data import Shard


def test_a_shard_is_one_of_several() -> None:
    assert Shard(1, 4) == Shard(index=1, count=4)


@pytest.mark.parametrize(
    ("index", "count", "message"),
    [
        (0, 0, "count=0: data is divided among at least 1 shard"),
        (0, -2, "count=-2: data is divided among at least 1 shard"),
        (-1, 4, "index=-1: with count=4 the shards are 0 to 3"),
        (4, 4, "index=4: with count=4 the shards are 0 to 3"),
    ],
)
def test_a_shard_that_is_none_of_several_is_refused(index: int, count: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Shard(index, count)


@pytest.mark.parametrize(("index", "count"), [(0, 2.0), ("0", 2), (True, 2), (0.5, 2), (None, 2)])
def test_what_is_no_integer_is_refused(index: Any, count: Any) -> None:
    with pytest.raises(TypeError, match="must be an integer, such as a rank or a number of ranks"):
        Shard(index, count)
