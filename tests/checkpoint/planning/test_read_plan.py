from collections.abc import Sequence
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from checkpoint.divisions import Boxes, divided
from drivetrain_checkpoint.format.manifest import StoredBox
from drivetrain_checkpoint.format.shards import TensorShard
from drivetrain_checkpoint.planning import read_plan
from drivetrain_checkpoint.planning.read_plan import fill, plan_reads
from drivetrain_weights.safetensors_layout import bytes_of
from drivetrain_weights.tensor_box import Box, whole


def stored(tensor: torch.Tensor, ranks: Sequence[Boxes]) -> tuple[list[StoredBox], dict[str, bytes]]:
    """A tensor as its ranks write it: pieces one behind the other in a file each."""
    pieces: list[StoredBox] = []
    files: dict[str, bytes] = {}
    for rank, boxes in enumerate(ranks):
        content = b"header"
        for box in boxes:
            if not any(piece.box == box for piece in pieces):
                pieces.append(StoredBox(f"r{rank}", len(content), box))
                part = tensor[box.slices()].contiguous()
                content += bytes(bytes_of(part))
        files[f"r{rank}"] = content
    return pieces, files


@given(st.lists(st.integers(1, 6), max_size=3).map(tuple), st.integers(1, 4), st.integers(1, 4), st.data())
def test_every_rank_gets_its_elements_whoever_wrote_them(
    shape: tuple[int, ...], writers: int, readers: int, data: st.DataObject
) -> None:
    tensor = torch.arange(prod(shape), dtype=torch.int16).reshape(shape)
    pieces, files = stored(tensor, data.draw(divided(shape, writers)))
    for boxes in data.draw(divided(shape, readers)):
        shards = [TensorShard(box, torch.full(box.sizes, -1, dtype=torch.int16)) for box in boxes]
        for file, reads in plan_reads([(pieces, shards)]).items():
            assert reads == sorted(reads, key=lambda read: read.start)
            for read in reads:
                content = bytearray(files[file][read.start : read.start + read.size_bytes])
                if read.rows is None:
                    bytes_of(read.target)[:] = content
                else:
                    fill(read, torch.frombuffer(content, dtype=torch.uint8))
        for shard in shards:
            assert torch.equal(shard.data, tensor[shard.box.slices()])


def test_a_slice_of_rows_is_read_and_nothing_else() -> None:
    shard = TensorShard(Box((2, 0), (3, 4)), torch.empty(3, 4))
    [read] = plan_reads([([StoredBox("f", 100, whole((10, 4)))], [shard])])["f"]
    assert (read.start, read.size_bytes, read.rows) == (100 + 2 * 4 * 4, 3 * 4 * 4, None)


def test_columns_are_read_with_their_rows_in_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_plan, "_MOST_BYTES", 2 * 4 * 4)
    shard = TensorShard(Box((2, 1), (5, 2)), torch.empty(5, 2))
    reads = plan_reads([([StoredBox("f", 0, whole((10, 4)))], [shard])])["f"]
    assert [read.rows for read in reads] == [Box((2, 0), (2, 4)), Box((4, 0), (2, 4)), Box((6, 0), (1, 4))]
    assert max(read.size_bytes for read in reads) == 32
