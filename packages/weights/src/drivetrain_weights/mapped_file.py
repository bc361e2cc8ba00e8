"""A memory-mapped file of weights, whose tensors are the file's pages: they take no memory until their first use."""

import errno
import mmap
import os
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from drivetrain_weights.errors import WeightFilesError
from drivetrain_weights.regular_file import open_regular
from drivetrain_weights.safetensors_layout import DTYPES, StoredEntry, bytes_of, read_header
from drivetrain_weights.torch_file import TORCH_SUFFIXES, map_tensors


class _Stamp(NamedTuple):
    """The properties of a file that change if it is replaced or written to."""

    inode: int
    size_bytes: int
    modified_ns: int

    @classmethod
    def of(cls, path: Path | int) -> "_Stamp":
        found = os.stat(path)
        return cls(found.st_ino, found.st_size, found.st_mtime_ns)


class MappedFile:
    """A memory-mapped file of weights: a safetensors file, or a file of `torch.save`.

    The file stays open. If a save into the same folder replaces the file, the old content is still read.

    Attributes:
        path: The absolute path of the file.
        names: The names of its tensors.
        in_order: The names of its tensors, in the order of the file.
        metadata: The strings in its header by name; empty if the format has none.

    Raises:
        WeightFilesError: The file is missing, truncated, no file of weights, or no regular file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()  # stays valid if the process changes its working directory
        try:
            self._file = open_regular(path)
            weakref.finalize(self, os.close, self._file)
            self._stamp = _Stamp.of(self._file)
            # The offset of each tensor; empty if the format does not give offsets.
            self._starts: dict[str, int] = {}
            self.metadata: Mapping[str, str] = {}
            self._tensors = self._map(path)
        except FileNotFoundError as error:
            raise WeightFilesError(f"{path} is missing") from error
        except SafetensorError as error:
            raise WeightFilesError(
                f"{path} is no whole safetensors file ({error}): it was cut or damaged; fetch it again"
            ) from error
        except (MemoryError, RuntimeError) as error:
            # By default Linux maps no file larger than memory and swap.
            raise WeightFilesError(
                f"{path} cannot be mapped ({error}): store it as several files that are each smaller than the memory"
            ) from error
        self.check_in_place()
        self.in_order = tuple(self._tensors)
        self.names = frozenset(self.in_order)

    def _map(self, path: Path) -> dict[str, Tensor]:
        """Map the open file and return its tensors; record each tensor's offset. Subclasses read other formats."""
        if path.suffix in TORCH_SUFFIXES:
            return map_tensors(path)
        # safe_open checks the header and the file's size.
        with safe_open(path, framework="pt", device="cpu") as reader:
            header = read_header(path)
            self.metadata = header.metadata
            self._starts = {name: entry.start for name, entry in header.entries.items()}
            return _map_pages(self._file, header.entries, reader)

    def tensor(self, name: str) -> Tensor:
        """Return a tensor as the file's pages. Writes to it change memory, never the file."""
        return self._tensors[name]

    def start_of(self, name: str) -> int | None:
        """Return the offset of a tensor in the file, in bytes; None if the format does not give it."""
        return self._starts.get(name)

    def tensor_dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor."""
        return self._tensors[name].dtype

    def tensor_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return tuple(self._tensors[name].shape)

    def stamp(self) -> str:
        """Return a string that differs after the file at this path is replaced or written to."""
        return ":".join(map(str, self._stamp))

    def divisible(self, name: str) -> bool:
        """Return whether a tensor can be copied piece by piece; `torch.save` also writes non-contiguous tensors."""
        return name in self._starts or self._tensors[name].is_contiguous()

    def copy(self, name: str, target: Tensor, *, start: int = 0, buffer: Tensor) -> None:
        """Copy elements of a tensor, if possible by plain reads, which map no pages into this process's memory.

        Args:
            name: The name of the tensor.
            target: A contiguous tensor of one dim, on any device and of any dtype.
            start: The index of the first element to copy, in the flat tensor. A tensor that is not divisible is
                copied in full.
            buffer: A CPU tensor of bytes, as large as the copied elements, for targets of another device or dtype.
        """
        mapped = self._tensors[name]
        if name not in self._starts:
            if mapped.is_contiguous():
                target.copy_(mapped.view(-1)[start : start + target.numel()])
            else:
                target.view(mapped.shape).copy_(mapped)
            return
        direct = target.device.type == "cpu" and target.dtype == mapped.dtype
        size = mapped.element_size()
        read = target if direct else buffer[: target.numel() * size].view(mapped.dtype)
        memory, position = bytes_of(read), self._starts[name] + start * size
        while memory:
            count = os.preadv(self._file, [memory], position)
            if not count:
                raise WeightFilesError(f"{self.path} was cut while it was read: fetch it again")
            memory, position = memory[count:], position + count
        if not direct:
            target.copy_(read)

    def expect(self, name: str, *, start: int, size_bytes: int) -> None:
        """Ask the system to read bytes of a tensor ahead, from element `start`. Without known offsets, do nothing."""
        # To the system, threads that take turns reading a file look like random access, so it reads little ahead.
        if name in self._starts and hasattr(os, "posix_fadvise"):
            begin = self._starts[name] + start * self._tensors[name].element_size()
            os.posix_fadvise(self._file, begin, size_bytes, os.POSIX_FADV_WILLNEED)

    def forget(self, address: int, size_bytes: int) -> None:
        """Ask the system to drop a part of the file from the page cache, except pages that a process has mapped."""
        known = next((name for name in self._starts if self._tensors[name].nbytes), None)
        if known is not None and hasattr(os, "posix_fadvise"):
            begin = self.tensor(known).data_ptr() - self._starts[known]
            start = max(0, address - begin)
            os.posix_fadvise(self._file, start, address - begin + size_bytes - start, os.POSIX_FADV_DONTNEED)

    def check_unchanged(self) -> None:
        """Raise WeightFilesError if the file was written to after opening. Replacing the file is allowed."""
        # If it was truncated, using the missing pages ends the process; nothing can prevent that.
        if _Stamp.of(self._file) != self._stamp:
            raise self._describe_change()

    def check_in_place(self) -> None:
        """Raise WeightFilesError unless the path still names the opened file, with the same size."""
        try:
            found = _Stamp.of(self.path)
        except FileNotFoundError:
            raise self._describe_change() from None
        if found[:2] != self._stamp[:2]:
            raise self._describe_change()

    def _describe_change(self) -> WeightFilesError:
        return WeightFilesError(
            f"{self.path} has changed since the model was loaded from it: load the model again, and write new "
            "weights into new files"
        )


def _map_pages(file: int, entries: Mapping[str, StoredEntry], reader: Any) -> dict[str, Tensor]:
    """Map a file's pages as tensors, without reading them. Raise MemoryError if the system refuses to map."""
    # Not by the library's own `get_tensor`, which makes the system read each tensor at once (safetensors 0.8).
    if not any(entry.size_bytes for entry in entries.values()):
        return {name: reader.get_tensor(name) for name in entries}
    try:
        pages = mmap.mmap(file, 0, access=mmap.ACCESS_COPY)
    except OSError as error:
        if error.errno == errno.ENOMEM:
            raise MemoryError(str(error)) from error
        raise
    tensors: dict[str, Tensor] = {}
    for name, entry in entries.items():
        dtype = DTYPES.get(entry.dtype)
        if dtype is None or entry.size_bytes == 0:
            tensors[name] = reader.get_tensor(name)
        else:
            count = entry.size_bytes // dtype.itemsize
            flat = torch.frombuffer(pages, dtype=dtype, count=count, offset=entry.start)
            tensors[name] = flat.view(entry.shape)
    return tensors
