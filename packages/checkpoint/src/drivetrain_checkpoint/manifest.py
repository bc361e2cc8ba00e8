"""The manifest: what a checkpoint consists of. It appears last and in one piece, and makes it a checkpoint."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import xxhash

from drivetrain_checkpoint.errors import CorruptCheckpointError, StateError
from drivetrain_checkpoint.files import BLOCK_BYTES, FileRecord, check_size, sync_folder
from drivetrain_checkpoint.layout import MANIFEST, UNCOMMITTED_MANIFEST, Parts
from drivetrain_checkpoint.tree import Json, decode, encode

FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a checkpoint consists of.

    Attributes:
        step: The optimizer step it was saved at.
        sequence: Its number among the saves into its directory, from 1: the highest is the newest.
        save_id: Random; by it the ranks know that they see the same checkpoint.
        saved_at: When rank 0 committed it: UTC, ISO 8601.
        world_size: The number of ranks that saved.
        parts: The stems of its files.
        files: Sizes and checksums by file name.
        libraries: Versions of what wrote it.
        plan: The effective plan of the run, if one was given.
    """

    step: int
    sequence: int
    save_id: str
    saved_at: str
    world_size: int
    parts: Parts
    files: Mapping[str, FileRecord]
    libraries: Mapping[str, str]
    plan: Mapping[str, Any] | None


def commit_manifest(folder: Path, manifest: Manifest) -> None:
    """Make the files of `folder` a checkpoint: from this rename on it is one, and before it it is none.

    The files must be on the disk already, and are their folder's entries before the manifest is.
    """
    content = _to_json(manifest)
    text = json.dumps({**content, "checksum": _checksum(content)}, allow_nan=False, indent=1)
    sync_folder(folder)
    sync_folder(folder.parent)
    temporary = folder / UNCOMMITTED_MANIFEST
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(folder / MANIFEST)
    sync_folder(folder)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint's folder.

    Raises:
        CorruptCheckpointError: It is missing, damaged, or of a newer format.
    """
    path = folder / MANIFEST
    try:
        text = path.read_bytes()
    except FileNotFoundError as error:
        raise CorruptCheckpointError(
            f"{path} is missing: this save was never completed; load another checkpoint"
        ) from error
    try:
        content = json.loads(text)
        checksum = content.pop("checksum")
        version = content["format_version"]
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CorruptCheckpointError(f"{path} is damaged: {error}; load another checkpoint") from error
    if checksum != _checksum(content):
        raise CorruptCheckpointError(f"{path} is damaged: its checksum does not fit; load another checkpoint")
    if version != FORMAT_VERSION:
        raise CorruptCheckpointError(
            f"{path} is of format {version}, and this drivetrain-checkpoint reads {FORMAT_VERSION}: upgrade it"
        )
    return _from_json(content)


def check_files(folder: Path, manifest: Manifest) -> None:
    """Check that every file is there in its full size; what is in it is checked when it is read.

    Raises:
        CorruptCheckpointError: One is not; the message names it.
    """
    for record in manifest.files.values():
        check_size(folder / record.name, record)


def encode_plan(plan: Mapping[str, Any] | None) -> Json:
    """A plan as tagged JSON.

    Raises:
        StateError: It holds tensors, or something that JSON cannot express.
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
        "parts": {
            "models": dict(manifest.parts.models),
            "replicated": manifest.parts.replicated,
            "per_rank": list(manifest.parts.per_rank),
        },
        "checksum_kind": "xxh3_64",
        "checksum_block_bytes": BLOCK_BYTES,
        "files": {
            record.name: {"size_bytes": record.size_bytes, "checksums": list(record.checksums)}
            for record in manifest.files.values()
        },
        "libraries": dict(manifest.libraries),
        "plan": encode_plan(manifest.plan),
    }


def _from_json(content: dict[str, Any]) -> Manifest:
    parts = content["parts"]
    return Manifest(
        step=content["step"],
        sequence=content["sequence"],
        save_id=content["save_id"],
        saved_at=content["saved_at"],
        world_size=content["world_size"],
        parts=Parts(
            models=parts["models"], replicated=parts["replicated"], per_rank=tuple(parts["per_rank"])
        ),
        files={
            name: FileRecord(name=name, size_bytes=record["size_bytes"], checksums=tuple(record["checksums"]))
            for name, record in cast("dict[str, Any]", content["files"]).items()
        },
        libraries=content["libraries"],
        plan=decode(content["plan"], {}),
    )


def _checksum(content: Mapping[str, Json]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(content, sort_keys=True).encode())
