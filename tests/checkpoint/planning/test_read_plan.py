from collections.abc import Sequence
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from checkpoint.divisions import Boxes, divided
from drivetrain_checkpoint.format.checksummed_io import FileRecord
from drivetrain_checkpoint.format.division import Division
from drivetrain_checkpoint.format.layout import tensor_file
from drivetrain_checkpoint.format.manifest import Manifest
from drivetrain_checkpoint.format.shards import TensorShard
from drivetrain_checkpoint.planning import read_plan
from drivetrain_checkpoint.planning.read_plan import fill, plan_reads
from drivetrain_weights.safetensors_layout import bytes_of
from drivetrain_weights.tensor_box import Box, whole


def stored(tensor: torch.Tensor, ranks: Sequence[Boxes]) -> tuple[Manifest, dict[int, bytes]]:
    """A tensor as its ranks write it, behind one of another dtype: pieces one behind the other in a file each."""
    boxes: dict[int, tuple[Box, ...]] = {}
    files: dict[int, bytes] = {}
    for rank, held in enumerate(ranks):
        met = {box for found in boxes.values() for box in found}
        boxes[rank] = tuple(box for box in dict.fromkeys(held) if box not in met)
        files[rank] = b"header" + b"x" * 8
        for box in boxes[rank]:
            part = tensor[box.slices()].contiguous()
            files[rank] += bytes(bytes_of(part))
    before = Division("I64", 8, (len(ranks),), {rank: (Box((rank,), (1,)),) for rank in boxes})
    division = Division(
        "I16", 2, tuple(tensor.shape), {rank: found for rank, found in boxes.items() if found}
    )
    sizes = {rank: len(content) for rank, content in files.items()}
    return manifest({"x": division, "before": before}, sizes), files


def manifest(tensors: dict[str, Division], sizes: dict[int, int]) -> Manifest:
    names = {rank: tensor_file("state", rank, 0) for rank in sizes}
    return Manifest(
        step=1, sequence=1, save_id="", saved_at="", world_size=len(sizes), mesh={}, attempt=0, models=(),
        files={
            names[rank]: FileRecord(name=names[rank], size_bytes=size, checksums=())
            for rank, size in sizes.items()
        },
        tensors={"state": tensors}, libraries={}, plan=None, metrics={},
    )  # fmt: skip


@given(st.lists(st.integers(1, 6), max_size=3).map(tuple), st.integers(1, 4), st.integers(1, 4), st.data())
def test_every_rank_gets_its_elements_whoever_wrote_them(
    shape: tuple[int, ...], writers: int, readers: int, data: st.DataObject
) -> None:
    tensor = torch.arange(prod(shape), dtype=torch.int16).reshape(shape)
    described, files = stored(tensor, data.draw(divided(shape, writers)))
    for boxes in data.draw(divided(shape, readers)):
        shards = [TensorShard(box, torch.full(box.sizes, -1, dtype=torch.int16)) for box in boxes]
        for rank, reads in plan_reads(described, "state", {"x": shards}):
            assert reads == sorted(reads, key=lambda read: read.start)
            for read in reads:
                content = bytearray(files[rank][read.start : read.start + read.size_bytes])
                if read.rows is None:
                    bytes_of(read.target)[:] = content
                else:
                    fill(read, torch.frombuffer(content, dtype=torch.uint8))
        for shard in shards:
            assert torch.equal(shard.data, tensor[shard.box.slices()])


def of_one_piece() -> Manifest:
    """A tensor of ten rows of four, from byte 100 on."""
    return manifest({"x": Division("F32", 4, (10, 4), {0: (whole((10, 4)),)})}, {0: 100 + 160})


def test_a_slice_of_rows_is_read_and_nothing_else() -> None:
    shard = TensorShard(Box((2, 0), (3, 4)), torch.empty(3, 4))
    [(_, [read])] = plan_reads(of_one_piece(), "state", {"x": [shard]})
    assert (read.start, read.size_bytes, read.rows) == (100 + 2 * 4 * 4, 3 * 4 * 4, None)


def test_columns_are_read_with_their_rows_in_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_plan, "_MOST_BYTES", 2 * 4 * 4)
    shard = TensorShard(Box((2, 1), (5, 2)), torch.empty(5, 2))
    [(_, reads)] = plan_reads(of_one_piece(), "state", {"x": [shard]})
    assert [read.rows for read in reads] == [Box((2, 0), (2, 4)), Box((4, 0), (2, 4)), Box((6, 0), (1, 4))]
    assert max(read.size_bytes for read in reads) == 32


def test_memory_that_is_not_contiguous_is_filled_through_a_buffer() -> None:
    shards = [
        [TensorShard(whole((10, 4)), torch.empty(10, 4))], [TensorShard(whole((10, 4)), torch.empty(4, 10).T)]
    ]  # fmt: skip
    division = Division("F32", 4, (10, 4), {0: (whole((10, 4)),)})
    described = manifest({"x": division, "y": division}, {0: 320})
    [(_, [dense, other])] = plan_reads(described, "state", dict(zip("xy", shards, strict=True)))
    assert (dense.rows, other.rows) == (None, whole((10, 4)))
