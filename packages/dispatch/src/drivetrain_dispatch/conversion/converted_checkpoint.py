"""A checkpoint that is converted to a model's names and shapes while it is read."""

import hashlib
import logging
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from uuid import uuid4

import torch
from torch import Tensor

from drivetrain_dispatch.conversion.lazy_tensor import LazyTensor, TensorInFile
from drivetrain_dispatch.errors import WeightFilesError
from drivetrain_weights import Box, MappedFile
from drivetrain_weights.aligned_file import create_aligned

logger = logging.getLogger(__name__)


class ConvertedCheckpoint:
    """A checkpoint whose tensors have the model's names and shapes, and are converted as they are read.

    Args:
        path: The path of the checkpoint.
        tensors: The lazy tensor of each name in the model.
    """

    def __init__(self, path: Path, tensors: Mapping[str, LazyTensor]) -> None:
        self.path = path
        self._tensors = tensors
        self._files = {file: None for tensor in tensors.values() for file in tensor.files()}

    def tensor(self, name: str) -> Tensor:
        """Return a tensor: pages of its file if it is a view of a single tensor there, otherwise computed values."""
        return self._tensors[name].values()

    def tensor_dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor."""
        return self._tensors[name].dtype

    def tensor_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return tuple(self._tensors[name].shape)

    def divisible(self, name: str) -> bool:
        """Return whether a tensor can be copied piece by piece, which requires that a file stores it unconverted."""
        origin = self._tensors[name].origin
        return isinstance(origin, TensorInFile) and origin.file.divisible(origin.name)

    def start_of(self, name: str) -> int | None:
        """Return the offset of a tensor's first part in its file, in bytes."""
        return self._tensors[name].position()[1]

    def copy(self, name: str, target: Tensor, *, start: int = 0, buffer: Tensor) -> None:
        """Copy elements of a tensor from `start` on; a tensor that is not divisible is copied as a whole.

        Raises:
            WeightFilesError: A file is truncated.
        """
        lazy = self._tensors[name]
        if isinstance(lazy.origin, TensorInFile):
            lazy.origin.file.copy(lazy.origin.name, target, start=start, buffer=buffer)
        else:
            lazy.read_into(target.view(lazy.shape))

    def expect(self, name: str, *, start: int, size_bytes: int) -> None:
        """Ask the system to read ahead elements from `start` on; all elements if the tensor is not divisible."""
        lazy = self._tensors[name]
        if isinstance(lazy.origin, TensorInFile):
            lazy.origin.file.expect(lazy.origin.name, start=start, size_bytes=size_bytes)
            return
        for file, own_name in lazy.inputs():
            file.expect(own_name, start=0, size_bytes=file.tensor(own_name).nbytes)

    def copy_box(self, name: str, target: Tensor, box: Box) -> None:
        """Copy a box of a tensor."""
        target.copy_(self.tensor(name)[box.slices()])

    def file_of(self, name: str) -> MappedFile | None:
        """Return the file whose pages a tensor is; None if its values are computed."""
        lazy = self._tensors[name]
        return next(iter(lazy.files())) if lazy.is_mapped() else None

    def is_computed(self, name: str) -> bool:
        """Return whether a tensor is computed without reading any file."""
        return not self._tensors[name].files()

    def check_unchanged(self) -> None:
        """Check that the files were not written to since they were opened.

        Raises:
            WeightFilesError: A file was written to.
        """
        for file in self._files:
            file.check_unchanged()

    def written(self, dtypes: Mapping[str, torch.dtype], folder: Path) -> MappedFile:
        """Write converted tensors to a file in a folder, or open the file that an earlier call has written.

        The file's name contains a hash of the tensors' recipes and of the sizes and times of the checkpoint's files.
        The file is never deleted here. Tensors are written one after the other, into the file's pages.

        Args:
            dtypes: The dtype of each tensor to write, by name.
            folder: The folder of the file, created if it is missing.

        Raises:
            WeightFilesError: The file could not be written; no part of it is left behind.
        """
        recipes = "\n".join(
            f"{name} {dtypes[name]} {self._tensors[name].recipe()}" for name in sorted(dtypes)
        )
        path = folder / f"converted-{hashlib.sha256(recipes.encode()).hexdigest()[:16]}.safetensors"
        if (earlier := _opened(path, dtypes)) is not None:
            return earlier
        like = {
            name: torch.empty(self._tensors[name].shape, dtype=dtype, device="meta")
            for name, dtype in dtypes.items()
        }
        unfinished = path.with_name(f".{uuid4().hex[:12]}-{path.name}")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            try:
                self._write(unfinished, like)
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
            "wrote %.1f MB of converted weights for the disk to %s; later loads of the same checkpoint with the same "
            "map reuse them",
            path.stat().st_size / 1e6,
            path,
        )
        return file

    def _write(self, path: Path, like: Mapping[str, Tensor]) -> None:
        for name, target in create_aligned(like, path).items():
            self._tensors[name].read_into(target)
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
