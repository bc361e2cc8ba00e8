"""The files of a model's weights, as safetensors, torch and Hugging Face's libraries lay them out.

A tensor of a mapped file is the file's pages: it takes no memory of its own, and is read on first use.
"""

import errno
import json
import mmap
import os
import re
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from drivetrain_dispatch.errors import WeightFilesError
from drivetrain_dispatch.files.aligned_file import DTYPES, bytes_of, is_padding
from drivetrain_dispatch.files.torch_file import PICKLED_SUFFIXES, map_pickled

_SUFFIX = ".safetensors"
# In order of preference: the suffix of an index, the file names that transformers and diffusers use for a folder's
# weights, and the suffixes of other weight files.
_KINDS = (
    (f"{_SUFFIX}.index.json", (f"model{_SUFFIX}", f"diffusion_pytorch_model{_SUFFIX}"), (_SUFFIX,)),
    (".bin.index.json", ("pytorch_model.bin", "diffusion_pytorch_model.bin"), PICKLED_SUFFIXES),
)
_INDICES = tuple(index for index, _, _ in _KINDS)
# The name of a variant (another dtype, for example) in an index's name. In a file's name it precedes the suffix.
_VARIANT = re.compile(r"(?<=\.index)\.[^.]+(?=\.json$)")
_SHARD = re.compile(r"-\d+-of-\d+\.")
_OWN = ("converted-", "offloaded-", ".")  # prefixes of files of this package and of unfinished files
_NUM_SHOWN = 5


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
    """A memory-mapped file of weights: a safetensors file, or one that `torch.save` wrote.

    The file stays open, so that its content is still read if another file replaces it, as a save into the same
    folder does.

    Args:
        path: The file to map.

    Attributes:
        path: The absolute path of the file.
        names: The names of its tensors.
        in_order: The names of its tensors, in the order of the file.

    Raises:
        WeightFilesError: The file is missing, truncated, or not a file of weights.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()  # stays valid if the process changes its working directory
        try:
            self._file = os.open(path, os.O_RDONLY)
            weakref.finalize(self, os.close, self._file)
            self._stamp = _Stamp.of(self._file)
            # The offset of each tensor; empty if the format does not give offsets.
            self._starts: dict[str, int] = {}
            if path.suffix in PICKLED_SUFFIXES:
                self._tensors = map_pickled(path)
            else:
                # safe_open checks the header and the file's size.
                with safe_open(path, framework="pt", device="cpu") as reader:
                    entries = _entries(path)
                    self._starts = {name: entry.start for name, entry in entries.items()}
                    self._tensors = _mapped(self._file, entries, reader)
        except FileNotFoundError as error:
            raise WeightFilesError(f"{path} is missing") from error
        except (SafetensorError, IsADirectoryError) as error:
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

    def file_of(self, name: str) -> "MappedFile":  # noqa: ARG002 as the protocol has it
        """Return the file whose pages a tensor is: this file."""
        return self

    def divisible(self, name: str) -> bool:
        """Return whether a tensor can be copied piece by piece; `torch.save` also writes non-contiguous tensors."""
        return name in self._starts or self._tensors[name].is_contiguous()

    def copy(self, name: str, target: Tensor, *, start: int = 0, buffer: Tensor) -> None:
        """Copy elements of a tensor, if possible by reads that map no pages into this process's memory.

        Args:
            name: The name of the tensor.
            target: A contiguous tensor of one dim, on any device and of any dtype.
            start: The index of the first element to copy, in the flat tensor. A tensor that is not divisible is
                copied as a whole.
            buffer: A CPU tensor of bytes, at least as many as are copied, for targets of another device or dtype.

        Raises:
            WeightFilesError: The file was truncated meanwhile.
        """
        mapped = self._tensors[name]
        if name not in self._starts:
            whole = not mapped.is_contiguous()
            target.view(mapped.shape).copy_(mapped) if whole else target.copy_(
                mapped.view(-1)[start : start + target.numel()]
            )
            return
        direct = target.device.type == "cpu" and target.dtype == mapped.dtype
        size = mapped.element_size()
        read = target if direct else buffer[: target.numel() * size].view(mapped.dtype)
        self._fill(bytes_of(read), self._starts[name] + start * size)
        if not direct:
            target.copy_(read)

    def expect(self, name: str, *, start: int, size_bytes: int) -> None:
        """Ask the system to read ahead a part of a tensor; does nothing if the format gives no offsets.

        To the system, threads that take turns reading a file look like random access, so it reads little ahead.

        Args:
            name: The name of the tensor.
            start: The index of the first element of the part.
            size_bytes: The bytes of the part.
        """
        if name in self._starts and hasattr(os, "posix_fadvise"):
            begin = self._starts[name] + start * self._tensors[name].element_size()
            os.posix_fadvise(self._file, begin, size_bytes, os.POSIX_FADV_WILLNEED)

    def copy_box(self, name: str, target: Tensor, box: Sequence[tuple[int, int]]) -> None:
        """Copy a part of a tensor, given by its start and end in each dim, through the file's pages."""
        target.copy_(self._tensors[name][tuple(slice(begin, end) for begin, end in box)])

    def _fill(self, memory: memoryview, start: int) -> None:
        while memory:
            count = os.preadv(self._file, [memory], start)
            if not count:
                raise WeightFilesError(f"{self.path} was cut while it was read: fetch it again")
            memory, start = memory[count:], start + count

    def forget(self, address: int, size_bytes: int) -> None:
        """Ask the system to drop a part of the file from the page cache, except pages that a process has mapped.

        Args:
            address: The address of the part in memory. Does nothing if the format gives no offsets.
            size_bytes: The bytes of the part.
        """
        known = next((name for name in self._starts if self._tensors[name].nbytes), None)
        if known is not None and hasattr(os, "posix_fadvise"):
            begin = self.tensor(known).data_ptr() - self._starts[known]
            start = max(0, address - begin)
            os.posix_fadvise(self._file, start, address - begin + size_bytes - start, os.POSIX_FADV_DONTNEED)

    def check_unchanged(self) -> None:
        """Check that the file was not written to since it was opened; it may have been deleted or replaced.

        Raises:
            WeightFilesError: The file was written to. If it was truncated, using the missing pages ends the process;
                nothing can prevent that.
        """
        if _Stamp.of(self._file) != self._stamp:
            raise self._changed()

    def check_in_place(self) -> None:
        """Check that the path still names the opened file with the same size; its content is not checked.

        Raises:
            WeightFilesError: The file was replaced, deleted or truncated.
        """
        try:
            found = _Stamp.of(self.path)
        except FileNotFoundError:
            raise self._changed() from None
        if found[:2] != self._stamp[:2]:
            raise self._changed()

    def _changed(self) -> WeightFilesError:
        return WeightFilesError(
            f"{self.path} has changed since the model was loaded from it: load the model again, and write new "
            "weights into new files"
        )


def find_weights(checkpoint: Path | str) -> dict[str, Path]:
    """Return the file that holds each tensor of a model's weights, in the order of the files.

    Args:
        checkpoint: A safetensors file, a file that `torch.save` wrote, an index of several files
            (`*.safetensors.index.json` or `*.bin.index.json`), or a folder that contains one of these; safetensors
            takes precedence. A variant (`model.fp16.safetensors`, `model.safetensors.index.fp16.json`) is used only
            if the folder contains nothing else.

    Raises:
        WeightFilesError: The checkpoint is none of these, or one of its files is missing, damaged, or lacks a tensor.
    """
    return {name: file.path for name, file in open_weights(checkpoint).items()}


def open_weights(checkpoint: Path | str) -> dict[str, MappedFile]:
    """Open the files of `find_weights`, and return the one that holds each tensor."""
    path = Path(checkpoint).expanduser()
    if path.is_dir():
        path = _in_folder(path)
    if _VARIANT.sub("", path.name).endswith(_INDICES):
        return _indexed(path)
    if path.suffix not in (_SUFFIX, *PICKLED_SUFFIXES):
        raise WeightFilesError(
            f"{path} is no model's weights: name a {_SUFFIX} file, one of {', '.join(PICKLED_SUFFIXES)} that "
            f"torch.save wrote, an index *{' or *'.join(_INDICES)}, or a folder that holds one"
        )
    file = MappedFile(path)
    return dict.fromkeys(file.in_order, file)


def weights_of(folder: Path, variant: str | None) -> Path:
    """Return what to load from a folder: the folder itself, or the index or file of a variant of its weights.

    Raises:
        WeightFilesError: The folder has no such variant.
    """
    if variant is None:
        return folder
    for pattern in (
        f"*.index.{variant}.json",
        f"*.{variant}{_SUFFIX}",
        *(f"*.{variant}{end}" for end in PICKLED_SUFFIXES),
    ):
        if found := sorted(path for path in folder.glob(pattern) if not _SHARD.search(path.name)):
            return found[0]
    raise WeightFilesError(
        f"variant={variant!r}: {folder} holds no weights called so; leave it out, or fetch them"
    )


def _in_folder(folder: Path) -> Path:
    """Return the index of a folder, or its only file of weights."""
    paths = sorted(path for path in folder.iterdir() if not path.name.startswith(_OWN))
    for index, usual, suffixes in _KINDS:
        indices = [path for path in paths if path.name.endswith(index)]
        files = [path for path in paths if path.suffix in suffixes]
        variants = [path for path in paths if _VARIANT.sub("", path.name).endswith(index)]
        named = [path for path in files if path.name in usual]
        found = indices or named or variants or files
        if len(found) == 1:
            return found[0]
        if found and all(_SHARD.search(path.name) for path in found):
            raise WeightFilesError(
                f"{folder} holds {len(found)} shards, {found[0].name} and so on, and no *{index} that says what is "
                "where: fetch it too"
            )
        if found:
            shown = ", ".join(path.name for path in found[:_NUM_SHOWN])
            raise WeightFilesError(f"{folder} holds several weights ({shown}): name one of them")
    raise WeightFilesError(
        f"{folder} holds no *{_SUFFIX} file, and none of {', '.join(PICKLED_SUFFIXES)}: fetch the weights too"
    )


def _indexed(index: Path) -> dict[str, MappedFile]:
    """Return the opened file of each tensor in an index, after checking the index against its files."""
    try:
        said: object = json.loads(index.read_text())
    except FileNotFoundError as error:
        raise WeightFilesError(f"{index} is missing") from error
    except ValueError as error:
        raise WeightFilesError(f"{index} is no JSON: {error}") from error
    names = said.get("weight_map") if isinstance(said, dict) else None
    if not isinstance(names, Mapping) or not all(isinstance(file, str) for file in names.values()):
        raise WeightFilesError(f'{index} has no "weight_map" from tensors to files')
    held: dict[str, MappedFile] = {}
    for file in sorted(set(names.values())):
        if Path(file).name != file:
            raise WeightFilesError(f"{index} names the file {file!r}: must be one beside it")
        held[file] = MappedFile(index.parent / file)
    if lacking := sorted(name for name, file in names.items() if name not in held[file].names):
        more = f" and {len(lacking) - _NUM_SHOWN} more" if len(lacking) > _NUM_SHOWN else ""
        raise WeightFilesError(
            f"{index} names tensors that their files do not hold: "
            f"{', '.join(f'{name!r} ({names[name]})' for name in lacking[:_NUM_SHOWN])}{more}"
        )
    return {name: file for said, file in held.items() for name in file.in_order if names.get(name) == said}


class _Entry(NamedTuple):
    """The entry of a tensor in a header, with its offset from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    size_bytes: int


def _entries(path: Path) -> dict[str, _Entry]:
    """Return the entries of a safetensors file, in the order of the file; its header has been checked."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header: dict[str, Any] = json.loads(file.read(length))
    header.pop("__metadata__", None)
    found: dict[str, _Entry] = {}
    for name, entry in header.items():
        if not is_padding(name):
            begin, end = entry["data_offsets"]
            found[name] = _Entry(entry["dtype"], tuple(entry["shape"]), 8 + length + begin, end - begin)
    return dict(sorted(found.items(), key=lambda item: item[1].start))


def _mapped(file: int, entries: Mapping[str, _Entry], reader: Any) -> dict[str, Tensor]:
    """Return the tensors as the file's pages, without reading any page.

    The library's own `get_tensor` is avoided, since it makes the system read each tensor at once (safetensors 0.8).

    Raises:
        MemoryError: The system refuses to map a file of this size.
    """
    if not any(entry.size_bytes for entry in entries.values()):
        return {name: reader.get_tensor(name) for name in entries}
    try:
        pages = mmap.mmap(file, 0, access=mmap.ACCESS_COPY)
    except OSError as error:
        if error.errno == errno.ENOMEM:
            raise MemoryError(str(error)) from error
        raise
    dtypes = {name: dtype for dtype, name in DTYPES.items()}
    tensors: dict[str, Tensor] = {}
    for name, entry in entries.items():
        dtype = dtypes.get(entry.dtype)
        if dtype is None or entry.size_bytes == 0:
            tensors[name] = reader.get_tensor(name)
        else:
            count = entry.size_bytes // dtype.itemsize
            tensors[name] = torch.frombuffer(pages, dtype=dtype, count=count, offset=entry.start).view(
                entry.shape
            )
    return tensors
