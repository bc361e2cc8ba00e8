"""Rows of the table "Where it differs" about streams of Hugging Face, on two ranks."""

from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import DataLoader

from accelerate_sides import SIDES
from optional_modules import skip_without
from processes import RankPool

skip_without("accelerate")
skip_without("datasets")


def numbers(begins: list[int]) -> Iterator[dict[str, int]]:
    for begin in begins:
        yield from ({"number": begin + step} for step in range(6))


def read_by_sides() -> list[list[list[int]]]:
    """Return the batches that a rank reads of a stream in two shards, by side."""
    from datasets import IterableDataset

    found: list[list[list[int]]] = []
    for side in SIDES:
        config = side("accelerate.utils.DataLoaderConfiguration")(dispatch_batches=False)
        with side.accelerator(dataloader_config=config) as accelerator:
            stream: Any = IterableDataset.from_generator(numbers, gen_kwargs={"begins": [0, 6]})
            loader = accelerator.prepare(DataLoader(stream, batch_size=2))
            found.append([batch["number"].tolist() for batch in loader])
    return found


@pytest.mark.slow
def test_shards_of_a_stream(rank_pools: dict[int, RankPool], pythons: tuple[str, ...]) -> None:
    """a Hugging Face stream in several shards that each process reads, `dispatch_batches=False`"""
    pool = rank_pools.setdefault(2, RankPool(2, pythons=pythons))
    theirs, ours, restored = zip(*pool.call(read_by_sides, timeout_seconds=90), strict=True)
    assert list(theirs) == [[[0, 1], [2, 3], [4, 5]], [[6, 7], [8, 9], [10, 11]]]
    assert list(ours) == list(restored) == [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [10, 11]]]
