"""Converted tensors in a file, which is written once and opened by later loads."""

import hashlib
import logging
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from uuid import uuid4

import torch

from drivetrain_dispatch.conversion.lazy_tensor import LazyTensor
from drivetrain_dispatch.errors import WeightFilesError
from drivetrain_messages import format_size
from drivetrain_weights import MappedFile
from drivetrain_weights.aligned_file import create_aligned

logger = logging.getLogger(__name__)


def write_converted_file(
    tensors: Mapping[str, LazyTensor], dtypes: Mapping[str, torch.dtype], folder: Path
) -> MappedFile:
    """Write converted tensors to a file in a folder, or open the file that an earlier call has written.

    The file's name contains a hash of the tensors' recipes and of the sizes and times of the checkpoint's files.
    The file is never deleted here. Tensors are written one after the other, into the file's pages.
    """
    recipes = "\n".join(f"{name} {dtypes[name]} {tensors[name].recipe()}" for name in sorted(dtypes))
    path = folder / f"converted-{hashlib.sha256(recipes.encode()).hexdigest()[:16]}.safetensors"
    if (earlier := _opened(path, dtypes)) is not None:
        return earlier
    unfinished = path.with_name(f".{uuid4().hex[:12]}-{path.name}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            _write(tensors, dtypes, unfinished)
            # Open before the rename, as another process may replace `path` with its own file.
            file = MappedFile(unfinished)
            os.replace(unfinished, path)
            file.path = path.absolute()
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise WeightFilesError(
            f"converted weights could not be written to {folder} ({error}): name another folder, or free the disk"
        ) from error
    logger.warning(
        "wrote %s of converted weights for the disk to %s; later loads of the same checkpoint with the same "
        "map reuse them",
        format_size(path.stat().st_size),
        path,
    )
    return file


def _write(tensors: Mapping[str, LazyTensor], dtypes: Mapping[str, torch.dtype], path: Path) -> None:
    like = {
        name: torch.empty(tensors[name].shape, dtype=dtype, device="meta") for name, dtype in dtypes.items()
    }
    for name, target in create_aligned(like, path).items():
        tensors[name].read_into(target)
    with path.open("rb+") as file:
        os.fsync(file.fileno())  # also flushes pages that were changed through the mapping


def _opened(path: Path, names: Collection[str]) -> MappedFile | None:
    """Open the file that an earlier load has written; None if it is missing, damaged or lacks a tensor."""
    if not path.exists():
        return None
    try:
        file = MappedFile(path)
    except WeightFilesError as error:
        logger.warning("%s; it is written anew", error)
        return None
    logger.info("reading converted weights from %s", path)
    return file if file.names >= set(names) else None
