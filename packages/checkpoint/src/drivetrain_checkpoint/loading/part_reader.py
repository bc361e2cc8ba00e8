"""Read the states of a checkpoint: only the slices that this rank needs, with every block verified."""

import ctypes
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias, cast

import torch
from torch import Tensor

from drivetrain_checkpoint.errors import CorruptCheckpointError
from drivetrain_checkpoint.format.checksummed_io import HashedReader
from drivetrain_checkpoint.format.division import Division
from drivetrain_checkpoint.format.layout import tensor_file, tree_file
from drivetrain_checkpoint.format.manifest import Manifest
from drivetrain_checkpoint.format.shards import Leaf, ReadTarget, make_target
from drivetrain_checkpoint.format.state_tree import Json, StateTree, decode
from drivetrain_checkpoint.planning.read_plan import Read, fill, plan_reads
from drivetrain_checkpoint.storage.place import Place
from drivetrain_weights.regular_file import parse_json
from drivetrain_weights.safetensors_layout import DTYPES, bytes_of
from drivetrain_weights.tensor_box import Box, whole

_SHORT_BYTES = 4096  # a view of so little costs more than a copy

# Maps a part and a tensor's name to a leaf with the sharding to load it in; None for the whole tensor.
Like: TypeAlias = Callable[[str, str], Leaf | None]


def read_parts(
    folder: Place,
    manifest: Manifest,
    parts: Sequence[str],
    *,
    like: Like,
    allow_pickle: bool,
    on_block: Callable[[], None],
) -> dict[str, StateTree]:
    """Read the states of some parts of a checkpoint, on the CPU."""
    trees = {part: read_tree(folder, manifest, part, on_block=on_block) for part in parts}
    targets = {
        part: _make_targets(manifest.tensors[part], lambda name, part=part: like(part, name))
        for part in parts
    }
    for part, tensors in targets.items():
        _read_targets(folder, manifest, part, tensors, on_block)
    return {
        part: decode(
            trees[part], {name: target.value for name, target in tensors.items()}, allow_pickle=allow_pickle
        )
        for part, tensors in targets.items()
    }


def read_tensors(
    folder: Place, manifest: Manifest, part: str, names: Sequence[str], *, on_block: Callable[[], None]
) -> dict[str, Tensor]:
    """Read some tensors of a part, whole and on the CPU; a block that holds bytes of several is read once."""
    tensors = manifest.tensors[part]
    targets = _make_targets({name: tensors[name] for name in names}, lambda _: None)
    _read_targets(folder, manifest, part, targets, on_block)
    return {name: target.value for name, target in targets.items()}


def read_tree(folder: Place, manifest: Manifest, part: str, *, on_block: Callable[[], None]) -> Json:
    """Read the tagged JSON of a part; see `state_tree.encode`."""
    name = tree_file(part, manifest.attempt)
    if name not in manifest.files:
        raise CorruptCheckpointError(f"{folder}: the manifest does not list {name}")
    with HashedReader(folder / name, manifest.files[name], on_block=on_block) as reader:
        try:
            return cast("Json", parse_json(reader.read_all(), where=str(folder / name)))
        except ValueError as error:
            raise CorruptCheckpointError(f"{error}; load another checkpoint") from error


def _make_targets(
    tensors: Mapping[str, Division], like: Callable[[str], Leaf | None]
) -> dict[str, ReadTarget]:
    kinds: dict[Division, tuple[Box, torch.dtype]] = {}
    targets: dict[str, ReadTarget] = {}
    for name, division in tensors.items():
        if (kind := kinds.get(division)) is None:
            if division.dtype not in DTYPES:
                raise CorruptCheckpointError(
                    f"{name!r} has the dtype {division.dtype}, which this torch does not have: use a newer torch"
                )
            kind = kinds[division] = whole(division.shape), DTYPES[division.dtype]
        targets[name] = make_target(*kind, like(name))
    return targets


def _read_targets(
    folder: Place,
    manifest: Manifest,
    part: str,
    targets: Mapping[str, ReadTarget],
    on_block: Callable[[], None],
) -> None:
    wanted = {name: target.shards for name, target in targets.items()}
    for rank, reads in plan_reads(manifest, part, wanted):
        file = tensor_file(part, rank, manifest.attempt)
        with HashedReader(folder / file, manifest.files[file], on_block=on_block) as reader:
            _read_file(reader, reads)


def _read_file(reader: HashedReader, wanted: Sequence[Read]) -> None:
    """Read from one file into the targets of the reads; partial and short reads use a temporary buffer."""
    rows: list[tuple[Read, Tensor]] = []
    short: list[tuple[list[Read], Tensor]] = []
    ranges: list[tuple[int, memoryview]] = []
    for reads in _bundled(wanted):
        first, last = reads[0], reads[-1]
        if len(reads) == 1 and first.rows is None:
            ranges.append((first.start, bytes_of(first.target)))
            continue
        content = torch.empty(last.start + last.size_bytes - first.start, dtype=torch.uint8)
        ranges.append((first.start, bytes_of(content)))
        if first.rows is None:
            short.append((reads, content))
        else:
            rows.append((first, content))
    reader.read_ranges(ranges)
    for reads, content in short:
        for read in reads:
            source = content.data_ptr() + read.start - reads[0].start
            ctypes.memmove(read.target.data_ptr(), source, read.size_bytes)
    for read, content in rows:
        fill(read, content)


def _bundled(wanted: Iterable[Read]) -> Iterator[list[Read]]:
    """Yield the reads of one file as lists; short reads without a gap between them form one list."""
    bundle: list[Read] = []
    end = -1
    for read in wanted:
        is_short = read.rows is None and read.size_bytes <= _SHORT_BYTES
        if bundle and not (is_short and read.start == end):
            yield bundle
            bundle = []
        bundle.append(read)
        end = read.start + read.size_bytes if is_short else -1
    if bundle:
        yield bundle
