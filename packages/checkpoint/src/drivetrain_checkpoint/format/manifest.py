"""The manifest of a checkpoint, which lists its content. It is written last and atomically, and commits it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, cast

import xxhash

from drivetrain_checkpoint.errors import CorruptCheckpointError, PickleNotAllowedError, StateError
from drivetrain_checkpoint.format.checksummed_io import BLOCK_BYTES, FileRecord, check_size
from drivetrain_checkpoint.format.layout import MANIFEST
from drivetrain_checkpoint.format.state_tree import Json, decode, encode
from drivetrain_checkpoint.storage.place import Place, storage_of
from drivetrain_weights.regular_file import parse_json
from drivetrain_weights.safetensors_layout import DTYPES
from drivetrain_weights.tensor_box import Box

FORMAT_VERSION = 2


@dataclass(frozen=True, slots=True)
class StoredBox:
    """The location of a box of a tensor.

    Attributes:
        file: The name of the file.
        start: The first byte in the file; the elements follow contiguously, in row-major order.
        box: The box of the tensor.
    """

    file: str
    start: int
    box: Box


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a checkpoint.

    Attributes:
        dtype: The safetensors name of the dtype.
        shape: The shape of the whole tensor.
        pieces: The pieces that hold it, each element once.
    """

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[StoredBox, ...]

    @property
    def size_bytes(self) -> int:
        """The size of all elements in bytes."""
        return prod(self.shape) * _item_bytes(self.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The content of a checkpoint.

    Attributes:
        step: The optimizer step at which it was saved.
        sequence: The number of the save among those into its directory, from 1: the highest is the newest.
        save_id: A random id, by which the ranks check that they see the same checkpoint.
        saved_at: The time at which rank 0 committed it: UTC, ISO 8601.
        world_size: The number of ranks that saved.
        mesh: The sizes of the parallel dimensions, by name; empty without a mesh.
        attempt: The attempt number in the names of the files; 0 unless the step was saved before.
        models: The names of the models.
        files: The sizes and checksums of the files, by file name.
        tensors: The tensors, by part of the checkpoint and by name.
        libraries: The versions of the libraries that wrote it.
        plan: The effective plan of the run; None if none was given.
        metrics: The metrics of the checkpoint by name.
    """

    step: int
    sequence: int
    save_id: str
    saved_at: str
    world_size: int
    mesh: Mapping[str, int]
    attempt: int
    models: tuple[str, ...]
    files: Mapping[str, FileRecord]
    tensors: Mapping[str, Mapping[str, StoredTensor]]
    libraries: Mapping[str, str]
    plan: Mapping[str, Any] | None
    metrics: Mapping[str, float]

    @property
    def size_bytes(self) -> int:
        """The size of all files except the manifest, in bytes."""
        return sum(record.size_bytes for record in self.files.values())


def commit_manifest(folder: Place, manifest: Manifest) -> None:
    """Write the manifest atomically, which turns the files of `folder` into a checkpoint.

    The files must be durable already.
    """
    content = _to_json(manifest)
    text = json.dumps({**content, "checksum": _checksum(content)}, allow_nan=False)
    storage_of(folder).put(folder / MANIFEST, text.encode())


def read_manifest(folder: Place) -> Manifest:
    """Read the manifest in a checkpoint's folder.

    Raises:
        CorruptCheckpointError: The manifest is missing, damaged, or of another format version.
    """
    path = folder / MANIFEST
    try:
        text = storage_of(path).read_whole(path)
    except (FileNotFoundError, IsADirectoryError) as error:
        raise CorruptCheckpointError(
            f"{path} is missing: this save was never completed; load another checkpoint"
        ) from error
    except ValueError as error:
        raise CorruptCheckpointError(f"{path} is no manifest: {error}; load another checkpoint") from error
    try:
        content = parse_json(text, where="it")
        checksum = content.pop("checksum")
        version = content["format_version"]
        fits = checksum == _checksum(content)
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CorruptCheckpointError(f"{path} is damaged: {error}; load another checkpoint") from error
    if not fits:
        raise CorruptCheckpointError(f"{path} is damaged: its checksum does not fit; load another checkpoint")
    if version != FORMAT_VERSION:
        raise CorruptCheckpointError(
            f"{path} is of format {version}, and this drivetrain-checkpoint reads {FORMAT_VERSION}: use the version "
            f"that wrote it, {content.get('libraries', {}).get('drivetrain-checkpoint')}"
        )
    try:
        manifest = _from_json(content)
        _check(manifest)
    except (
        KeyError, TypeError, ValueError, AttributeError, RecursionError, CorruptCheckpointError, PickleNotAllowedError
    ) as error:  # fmt: skip
        raise CorruptCheckpointError(
            f"{path} contradicts itself: {error}; load another checkpoint"
        ) from error
    return manifest


def check_files(folder: Place, manifest: Manifest) -> None:
    """Check that every file is there in full size; a load verifies the content as it reads it.

    Raises:
        CorruptCheckpointError: A file is missing or has another size; the message names it.
    """
    sizes = storage_of(folder).sizes_in(folder)
    for record in manifest.files.values():
        check_size(folder / record.name, sizes.get(record.name), record)


def encode_plan(plan: Mapping[str, Any] | None) -> Json:
    """Encode a plan as tagged JSON.

    Raises:
        StateError: The plan holds a tensor, or a value that JSON cannot express.
    """
    encoded = encode(plan, root="plan")
    if encoded.tensors:
        raise StateError(f"plan: {next(iter(encoded.tensors))!r} is a tensor; a plan is plain values")
    return encoded.json


def _to_json(manifest: Manifest) -> dict[str, Json]:
    return {
        "format": "drivetrain-checkpoint",
        "format_version": FORMAT_VERSION,
        "step": manifest.step,
        "sequence": manifest.sequence,
        "save_id": manifest.save_id,
        "saved_at": manifest.saved_at,
        "world_size": manifest.world_size,
        "mesh": dict(manifest.mesh),
        "attempt": manifest.attempt,
        "models": list(manifest.models),
        "checksum_kind": "xxh3_64",
        "checksum_block_bytes": BLOCK_BYTES,
        "files": {
            record.name: {"size_bytes": record.size_bytes, "checksums": list(record.checksums)}
            for record in manifest.files.values()
        },
        "tensors": {
            part: {name: _tensor_to_json(tensor) for name, tensor in tensors.items()}
            for part, tensors in manifest.tensors.items()
        },
        "libraries": dict(manifest.libraries),
        "plan": encode_plan(manifest.plan),
        "metrics": encode_plan(manifest.metrics),
    }


def _tensor_to_json(tensor: StoredTensor) -> Json:
    return {
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
        "pieces": [
            [piece.file, piece.start, list(piece.box.offsets), list(piece.box.sizes)]
            for piece in tensor.pieces
        ],
    }


def _tensor_from_json(content: dict[str, Any]) -> StoredTensor:
    return StoredTensor(
        dtype=content["dtype"],
        shape=tuple(content["shape"]),
        pieces=tuple(
            StoredBox(file, start, Box(offsets=tuple(offsets), sizes=tuple(sizes)))
            for file, start, offsets, sizes in content["pieces"]
        ),
    )


def _from_json(content: dict[str, Any]) -> Manifest:
    same = ("step", "sequence", "save_id", "saved_at", "world_size", "mesh", "attempt", "libraries")
    return Manifest(
        **{name: content[name] for name in same},
        models=tuple(content["models"]),
        files={
            name: FileRecord(name=name, size_bytes=record["size_bytes"], checksums=tuple(record["checksums"]))
            for name, record in cast("dict[str, Any]", content["files"]).items()
        },
        tensors={
            part: {name: _tensor_from_json(tensor) for name, tensor in tensors.items()}
            for part, tensors in cast("dict[str, Any]", content["tensors"]).items()
        },
        plan=decode(content["plan"], {}),
        metrics=decode(content["metrics"], {}),
    )


def _check(manifest: Manifest) -> None:
    """Check that a manifest is consistent: it may be crafted by an attacker, with a checksum that matches.

    Raises:
        ValueError: The manifest is inconsistent.
    """
    counts = {"step": manifest.step, "sequence": manifest.sequence, "attempt": manifest.attempt}
    for name, count in counts.items():
        if type(count) is not int or count < 0:
            raise ValueError(f"{name} is {count!r}")
    for record in manifest.files.values():
        if len(record.checksums) != -(-record.size_bytes // BLOCK_BYTES) or record.size_bytes < 0:
            raise ValueError(
                f"{record.name} has {len(record.checksums)} checksums for {record.size_bytes} bytes, instead of one "
                f"for each {BLOCK_BYTES}"
            )
    for part, tensors in manifest.tensors.items():
        for name, tensor in tensors.items():
            _check_pieces(f"{part}: {name!r}", tensor, manifest.files)


def _check_pieces(name: str, tensor: StoredTensor, files: Mapping[str, FileRecord]) -> None:
    """Check that each piece lies inside its file and tensor, and that the pieces have as many elements as the tensor.

    Raises:
        ValueError: A piece lies outside, or the number of elements differs.
    """
    for piece in tensor.pieces:
        size_bytes = piece.box.num_elements * _item_bytes(tensor.dtype)
        if piece.file not in files or not 0 <= piece.start <= files[piece.file].size_bytes - size_bytes:
            raise ValueError(
                f"{name} lies from byte {piece.start} on in {piece.file}, which does not reach so far"
            )
        for start, size, length in zip(piece.box.offsets, piece.box.sizes, tensor.shape, strict=True):
            if not 0 <= start <= start + size <= length:
                raise ValueError(f"{name} of shape {tensor.shape} has a piece at {piece.box}")
    found = sum(piece.box.num_elements for piece in tensor.pieces)
    if found != prod(tensor.shape) or len({piece.box for piece in tensor.pieces}) != len(tensor.pieces):
        raise ValueError(f"{name} of shape {tensor.shape} has pieces of {found} elements")


def _checksum(content: Mapping[str, Json]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(content, sort_keys=True).encode())


def _item_bytes(dtype: str) -> int:
    """Return the element size of a dtype by its name in the format, in bytes; 1 if this torch does not have it."""
    return DTYPES[dtype].itemsize if dtype in DTYPES else 1
