"""The protocol through which a load reads tensors, directly from files or converted on the fly."""

from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from drivetrain_weights import Box, MappedFile


class WeightSource(Protocol):
    """A source of named tensors, such as a `MappedFile`."""

    @property
    def path(self) -> Path:
        """The file or folder."""
        ...

    def tensor(self, name: str) -> Tensor:
        """Return a tensor: pages of its file if it is stored in one, otherwise computed values."""
        ...

    def tensor_dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor."""
        ...

    def tensor_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        ...

    def divisible(self, name: str) -> bool:
        """Return whether a tensor can be copied piece by piece."""
        ...

    def start_of(self, name: str) -> int | None:
        """Return the offset of a tensor in its file, in bytes; None if it is unknown."""
        ...

    def copy(self, name: str, target: Tensor, *, start: int = 0, buffer: Tensor) -> None:
        """Copy elements of a tensor from `start` on; a tensor that is not divisible is copied as a whole."""
        ...

    def expect(self, name: str, *, start: int, size_bytes: int) -> None:
        """Ask the system to read ahead elements from `start` on; all elements if the tensor is not divisible."""
        ...

    def copy_box(self, name: str, target: Tensor, box: Box) -> None:
        """Copy a box of a tensor."""
        ...

    def file_of(self, name: str) -> MappedFile | None:
        """Return the file whose pages a tensor is; None if its values are computed."""
        ...

    def check_unchanged(self) -> None:
        """Check that the files were not written to since they were opened.

        Raises:
            WeightFilesError: A file was written to.
        """
        ...
