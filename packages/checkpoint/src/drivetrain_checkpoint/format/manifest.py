"""The manifest of a checkpoint: it lists the content. Written last and atomically, it commits the checkpoint."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, cast

import xxhash

from drivetrain_checkpoint.errors import CorruptCheckpointError, PickleNotAllowedError, StateError
from drivetrain_checkpoint.format.checksummed_io import BLOCK_BYTES, FileRecord, check_size
from drivetrain_checkpoint.format.division import Division, Divisions, bytes_by_rank, starts_in_file
from drivetrain_checkpoint.format.format_2 import from_format_2
from drivetrain_checkpoint.format.layout import MANIFEST, tensor_file
from drivetrain_checkpoint.format.state_tree import Json, decode, encode
from drivetrain_checkpoint.storage.place import Place, storage_of
from drivetrain_weights.regular_file import parse_json
from drivetrain_weights.safetensors_layout import DTYPES
from drivetrain_weights.tensor_box import Box

FORMAT_VERSION = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The content of a checkpoint.

    Attributes:
        step: The optimizer step at which the checkpoint was saved.
        sequence: The number of the save in its directory, counted from 1: the newest save has the highest number.
        save_id: A random id; the ranks compare ids to check that they see the same checkpoint.
        saved_at: The time at which rank 0 committed the checkpoint: UTC, ISO 8601.
        world_size: The number of ranks that saved.
        mesh: The sizes of the parallel dimensions, by name; empty without a mesh.
        attempt: The attempt number in the names of the files; 0 unless the step was saved before.
        models: The names of the models.
        files: The sizes and checksums of the files, by file name.
        tensors: The tensors, by part of the checkpoint and by name, in the order in which they lie in the files.
        libraries: The versions of the libraries that wrote the checkpoint.
        plan: The effective plan of the run; None if none was given.
        metrics: The metrics of the checkpoint by name.
        starts: The first byte of each tensor, by file and by name; only a manifest of format 2 holds this.
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
    tensors: Divisions
    libraries: Mapping[str, str]
    plan: Mapping[str, Any] | None
    metrics: Mapping[str, float]
    starts: Mapping[str, Mapping[str, int]] = field(default_factory=dict[str, Mapping[str, int]])

    @property
    def size_bytes(self) -> int:
        """The size of all files except the manifest, in bytes."""
        return sum(record.size_bytes for record in self.files.values())

    def starts_in(self, part: str, rank: int) -> Mapping[str, int]:
        """Return the first byte of each tensor in a rank's file of a part, in the order of the file."""
        file = tensor_file(part, rank, self.attempt)
        if file in self.starts:
            return self.starts[file]
        return starts_in_file(self.tensors[part], rank, self.files[file].size_bytes)


def commit_manifest(folder: Place, manifest: Manifest) -> None:
    """Write the manifest atomically, which turns the files of `folder` into a checkpoint.

    The files must be durable already.
    """
    content = _to_json(manifest)
    text = json.dumps({**content, "checksum": _checksum(content, FORMAT_VERSION)}, allow_nan=False)
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
        fits = checksum == _checksum(content, version)
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CorruptCheckpointError(f"{path} is damaged: {error}; load another checkpoint") from error
    if not fits:
        raise CorruptCheckpointError(f"{path} is damaged: its checksum does not fit; load another checkpoint")
    if version not in (2, FORMAT_VERSION):
        raise CorruptCheckpointError(
            f"{path} is of format {version}, and this drivetrain-checkpoint reads 2 and {FORMAT_VERSION}: use the "
            f"version that wrote it, {content.get('libraries', {}).get('drivetrain-checkpoint')}"
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
    """Raise CorruptCheckpointError if a file is missing or has another size. A load verifies the content it reads."""
    sizes = storage_of(folder).sizes_in(folder)
    for record in manifest.files.values():
        check_size(folder / record.name, sizes.get(record.name), record)


def encode_plan(plan: Mapping[str, Any] | None) -> Json:
    """Encode a plan as tagged JSON; `StateError` if it holds a tensor, or a value that JSON cannot express."""
    encoded = encode(plan, root="plan")
    if encoded.tensors:
        raise StateError(f"plan: {next(iter(encoded.tensors))!r} is a tensor; a plan is plain values")
    return encoded.json


def _to_json(manifest: Manifest) -> dict[str, Json]:
    divisions = list(dict.fromkeys(one for tensors in manifest.tensors.values() for one in tensors.values()))
    numbers = {division: number for number, division in enumerate(divisions)}
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
        "divisions": [
            {
                "dtype": division.dtype,
                "item_bytes": division.item_bytes,
                "shape": list(division.shape),
                "pieces": [
                    [rank, list(box.offsets), list(box.sizes)]
                    for rank, boxes in division.boxes.items()
                    for box in boxes
                ],
            }
            for division in divisions
        ],
        "tensors": {
            part: {name: numbers[division] for name, division in tensors.items()}
            for part, tensors in manifest.tensors.items()
        },
        "libraries": dict(manifest.libraries),
        "plan": encode_plan(manifest.plan),
        "metrics": encode_plan(manifest.metrics),
    }


def _from_json(content: dict[str, Any]) -> Manifest:
    same = ("step", "sequence", "save_id", "saved_at", "world_size", "mesh", "attempt", "libraries")
    starts: Mapping[str, Mapping[str, int]] = {}
    if content["format_version"] == 2:
        tensors, starts = from_format_2(content)
    else:
        divisions: dict[int, Division] = {}
        for number, described in enumerate(cast("list[dict[str, Any]]", content["divisions"])):
            boxes: dict[int, list[Box]] = {}
            for rank, offsets, sizes in described["pieces"]:
                boxes.setdefault(rank, []).append(Box(tuple(offsets), tuple(sizes)))
            by_rank = {rank: tuple(found) for rank, found in boxes.items()}
            shape = tuple(described["shape"])
            divisions[number] = Division(described["dtype"], described["item_bytes"], shape, by_rank)
        tensors = {
            part: {name: divisions[number] for name, number in numbers.items()}
            for part, numbers in cast("dict[str, dict[str, int]]", content["tensors"]).items()
        }
    return Manifest(
        **{name: content[name] for name in same},
        models=tuple(content["models"]),
        files={
            name: FileRecord.from_json(name, record)
            for name, record in cast("dict[str, Any]", content["files"]).items()
        },
        tensors=tensors,
        plan=decode(content["plan"], {}),
        metrics=decode(content["metrics"], {}),
        starts=starts,
    )


def _check(manifest: Manifest) -> None:
    """Check that a manifest is consistent: an attacker may have written it, with a checksum that matches."""
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
    checked: set[Division] = set()
    for part, tensors in manifest.tensors.items():
        for name, division in tensors.items():
            if division not in checked:
                _check_division(f"{part}: {name!r}", division)
                checked.add(division)
        for rank, size_bytes in bytes_by_rank(tensors.values()).items():
            file = tensor_file(part, rank, manifest.attempt)
            if file not in manifest.files or size_bytes > manifest.files[file].size_bytes:
                raise ValueError(
                    f"{file} is missing or too short for the {size_bytes} bytes the manifest lists"
                )


def _check_division(name: str, division: Division) -> None:
    """Check that each piece lies inside its tensor, and that the pieces have as many elements as the tensor."""
    known = DTYPES.get(division.dtype)
    if (
        type(division.item_bytes) is not int
        or division.item_bytes < 1
        or (known is not None and known.itemsize != division.item_bytes)
    ):
        raise ValueError(f"{name} of {division.dtype} has elements of {division.item_bytes!r} bytes")
    pieces = [box for boxes in division.boxes.values() for box in boxes]
    for box in pieces:
        for start, size, length in zip(box.offsets, box.sizes, division.shape, strict=True):
            if not 0 <= start <= start + size <= length:
                raise ValueError(f"{name} of shape {division.shape} has a piece at {box}")
    found = sum(box.num_elements for box in pieces)
    if found != prod(division.shape) or len(set(pieces)) != len(pieces):
        raise ValueError(f"{name} of shape {division.shape} has pieces of {found} elements")


def _checksum(content: Mapping[str, Json], version: object) -> str:
    """Return the checksum of a manifest. Since format 3 it covers the tensors' order, which gives their places."""
    return xxhash.xxh3_64_hexdigest(json.dumps(content, sort_keys=version == 2).encode())
