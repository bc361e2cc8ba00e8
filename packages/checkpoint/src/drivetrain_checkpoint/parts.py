"""A part of a checkpoint: one state in two files, tagged JSON and, if it holds tensors, safetensors."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast

from drivetrain_checkpoint.errors import CorruptCheckpointError
from drivetrain_checkpoint.files import FileRecord, HashedReader, HashedWriter
from drivetrain_checkpoint.tensor_file import read_tensors, write_tensors
from drivetrain_checkpoint.tree import Json, State, decode, encode


def write_part(
    folder: Path, stem: str, state: State, *, root: str, on_block: Callable[[], None]
) -> tuple[FileRecord, ...]:
    """Write a state as `STEM.json` and `STEM.safetensors`, on the disk when this returns.

    Args:
        folder: The checkpoint's.
        stem: The part's file name, without an ending.
        state: What to write.
        root: What error messages call it.
        on_block: Called as a sign of progress.

    Returns:
        The files for the manifest.

    Raises:
        StateError: The state holds something that cannot be stored.
    """
    encoded = encode(state, root=root)
    records: list[FileRecord] = []
    if encoded.tensors:
        with HashedWriter(folder / f"{stem}.safetensors", on_block=on_block) as writer:
            write_tensors(writer, encoded.tensors)
            records.append(writer.record())
    with HashedWriter(folder / f"{stem}.json", on_block=on_block) as writer:
        writer.write(json.dumps(encoded.json, allow_nan=False, indent=1).encode())
        records.append(writer.record())
    return tuple(records)


def read_part(
    folder: Path, stem: str, files: Mapping[str, FileRecord], *, on_block: Callable[[], None]
) -> State:
    """The state of a part, every byte checked against its checksum.

    Args:
        folder: The checkpoint's.
        stem: The part's file name, without an ending.
        files: The manifest's records by file name.
        on_block: Called as a sign of progress.

    Raises:
        CorruptCheckpointError: A file is missing or differs from its record.
    """
    tensors = {}
    if (name := f"{stem}.safetensors") in files:
        with HashedReader(folder / name, files[name], on_block=on_block) as reader:
            tensors = read_tensors(reader, folder / name)
            reader.finish()
    name = f"{stem}.json"
    if name not in files:
        raise CorruptCheckpointError(f"{folder}: the manifest does not list {name}")
    with HashedReader(folder / name, files[name], on_block=on_block) as reader:
        text = reader.read(files[name].size_bytes)
        reader.finish()
    return decode(cast("Json", json.loads(text)), tensors)
