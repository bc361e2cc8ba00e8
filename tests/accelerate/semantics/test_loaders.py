"""Rows of the table "Where it differs" about loaders and samplers, on one process."""

from typing import Any

import pytest
from torch.utils.data import BatchSampler, DataLoader

from accelerate_sides import OURS, RESTORED, SIDES, Side

pytest.importorskip("accelerate")
torchdata: Any = pytest.importorskip("torchdata.stateful_dataloader")


class Buckets(BatchSampler):
    """Batches of up to four samples."""

    def __init__(self) -> None:
        self.batch_size, self.drop_last = 4, False

    def __iter__(self) -> Any:
        return iter([[0], [1, 2], [3, 4, 5, 6], [7], [8, 9]])

    def __len__(self) -> int:
        return 5


def test_batches_of_other_sizes() -> None:
    """a batch sampler with batches of other sizes than its `batch_size`, by `BatchSamplerShard`"""

    def read(side: Side) -> list[list[list[int]]]:
        kind = side("accelerate.data_loader.BatchSamplerShard")
        return [list(kind(Buckets(), 2, rank)) for rank in range(2)]

    theirs, ours, restored = map(read, SIDES)
    read_by_theirs = {index for batches in theirs for batch in batches for index in batch}
    assert read_by_theirs < set(range(10))
    assert ours == restored == [[[0], [3, 4, 5, 6], [8, 9]], [[1, 2], [7], [0]]]


# torchdata 0.11 calls what torch 2.15 deprecates.
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_stateful() -> None:
    """`use_stateful_dataloader`"""
    for side in SIDES:
        options = side("accelerate.utils.DataLoaderConfiguration")(use_stateful_dataloader=True)
        with side.accelerator(dataloader_config=options) as accelerator:
            loader = accelerator.prepare(DataLoader(list(range(6)), batch_size=2))  # pyright: ignore[reportArgumentType]
            assert isinstance(loader, torchdata.StatefulDataLoader)
            next(iter(loader))
            assert loader.state_dict()["_num_yielded"] == 1
            rest = accelerator.skip_first_batches(loader, 1)
            assert isinstance(rest, torchdata.StatefulDataLoader) == (side in (OURS, RESTORED))
