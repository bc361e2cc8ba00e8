"""Streams of other libraries, also inside a stream of the user's."""

from collections.abc import Iterator
from typing import Any

import pytest
from datasets import Dataset, interleave_datasets
from datasets import IterableDataset as HuggingFace
from datasets.distributed import split_dataset_by_node
from torch.utils.data import DataLoader, IterableDataset

from drivetrain import Accelerator
from drivetrain_data import Shard, shard_loader
from drivetrain_data.state.integrations import check_undivided_stream, left_out_of_state, own_draws
from stateful_stream import Standing


def files(num_files: int = 4) -> HuggingFace:
    return Dataset.from_dict({"x": list(range(20))}).to_iterable_dataset(num_shards=num_files)


class Wrapped(IterableDataset[Any]):
    """A stream of the user's that hands on another's samples and state."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __iter__(self) -> Iterator[Any]:
        return iter(self.inner)

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()


@pytest.mark.parametrize("wrap", [lambda stream: stream, Wrapped])
def test_a_split_stream_divides_itself(wrap, caplog: pytest.LogCaptureFixture) -> None:
    check_undivided_stream(wrap(files()), alone=False)
    part = wrap(split_dataset_by_node(files(), rank=0, world_size=2))
    check_undivided_stream(part, alone=True)
    assert "this process reads part 0 of 2, and nothing more" in caplog.text
    with pytest.raises(ValueError, match=r"divides the data itself \(rank 0 of 2\)"):
        check_undivided_stream(part, alone=False)


def test_a_stream_of_mosaicml_is_refused_with_what_to_do() -> None:
    class StreamingDataset(IterableDataset[int]):
        """It has the name and the place of MosaicML's, which pins too much to be installed here."""

        __module__ = "streaming.base.dataset"

        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

    class Own(StreamingDataset):
        """One derived from it."""

    for alone in (True, False):
        with pytest.raises(ValueError, match="read it with MosaicML's own StreamingDataLoader"):
            check_undivided_stream(Own(), alone=alone)


@pytest.mark.parametrize("wrap", [lambda stream: stream, Wrapped])
def test_what_a_state_leaves_out_is_found_wherever_it_is(wrap) -> None:
    buffered = files().shuffle(seed=1, buffer_size=7).map(lambda sample: sample)
    assert left_out_of_state(wrap(files()), 0) is None
    assert left_out_of_state(wrap(files().shuffle(seed=1, buffer_size=1)), 1) is None
    assert left_out_of_state(wrap(buffered), 0) == "its shuffle buffer of 7 samples"
    inside = wrap(interleave_datasets([buffered, files()]))
    assert left_out_of_state(inside, 0) == "its shuffle buffer of 7 samples"
    assert "read by which of 2 workers" in (
        left_out_of_state(wrap(interleave_datasets([files(), files()])), 2) or ""
    )
    assert left_out_of_state(Standing(3), 2) is None


def test_the_order_of_a_shuffled_stream_has_a_mark() -> None:
    def shuffled(seed: int | None) -> HuggingFace:
        return files().shuffle(seed=seed, buffer_size=5)

    assert own_draws(files()) is None
    assert own_draws(shuffled(1)) == own_draws(Wrapped(shuffled(1))) != own_draws(shuffled(2))
    assert own_draws(shuffled(None)) != own_draws(shuffled(None))
    assert own_draws(files().shuffle(seed=1, buffer_size=3)) != own_draws(
        files().shuffle(seed=1, buffer_size=4)
    )


def test_a_stream_shuffled_without_a_seed_is_read_by_one_alone(caplog: pytest.LogCaptureFixture) -> None:
    unseeded = DataLoader(Wrapped(files().shuffle(buffer_size=3)))
    with pytest.raises(
        ValueError, match=r"in another order on each of 2 ranks.*give its shuffle\(\) a seed="
    ):
        shard_loader(unseeded, Shard(0, 2))
    assert not caplog.records
    shard_loader(unseeded, Shard(0, 1))
    assert "cannot be resumed in its middle; give its shuffle() a seed=" in caplog.text
    shard_loader(DataLoader(files().shuffle(seed=2**40, buffer_size=3)), Shard(0, 2))


@pytest.mark.ranks(2)
def test_a_dataset_is_split_between_processes_into_datasets() -> None:
    accelerator = Accelerator(cpu=True)
    data, rank = Dataset.from_dict({"x": list(range(5))}), accelerator.process_index
    with accelerator.split_between_processes({"all": data}) as mine:
        assert type(mine["all"]) is Dataset
        assert list(mine["all"]["x"]) == [[0, 1, 2], [3, 4]][rank]
    with accelerator.split_between_processes(data, apply_padding=True) as mine:
        assert list(mine["x"]) == [[0, 1, 2], [3, 4, 4]][rank]
