"""The protocol by which a load reads tensors: from files as they are, or converted while they are read."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from drivetrain_dispatch.files.weight_files import MappedFile


class WeightSource(Protocol):
    """Holds tensors by name; a `MappedFile` is one."""

    @property
    def path(self) -> Path:
        """The file or folder."""
        ...

    def tensor(self, name: str) -> Tensor:
        """Return a tensor: the pages of its file, where it has any; else it is computed."""
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
        """Return where a tensor begins in its file, in bytes; None where that is not known."""
        ...

    def copy(self, name: str, target: Tensor, *, start: int = 0, buffer: Tensor) -> None:
        """Copy elements of a tensor, from `start` on; all of them unless it is divisible."""
        ...

    def expect(self, name: str, *, start: int, size_bytes: int) -> None:
        """Have the system begin to read elements of a tensor, from `start` on; all of them unless it is divisible."""
        ...

    def copy_box(self, name: str, target: Tensor, box: Sequence[tuple[int, int]]) -> None:
        """Copy a part of a tensor, given by begin and end in each dim."""
        ...

    def file_of(self, name: str) -> MappedFile | None:
        """Return the file whose pages a tensor is; None if it is the pages of none."""
        ...

    def check_unchanged(self) -> None:
        """Check that nobody wrote into the files since they were opened.

        Raises:
            WeightFilesError: Somebody did.
        """
        ...
