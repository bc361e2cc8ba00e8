"""The files of a model's weights, as safetensors, torch and Hugging Face's libraries lay them out.

A tensor of such a file is the file's pages: it takes no memory of its own, and nothing is read before it is used.
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
# In the order of preference: what an index's name ends with, what files are called that are a folder's weights beside
# any others (by transformers and by diffusers), and other ends.
_KINDS = (
    (f"{_SUFFIX}.index.json", (f"model{_SUFFIX}", f"diffusion_pytorch_model{_SUFFIX}"), (_SUFFIX,)),
    (".bin.index.json", ("pytorch_model.bin", "diffusion_pytorch_model.bin"), PICKLED_SUFFIXES),
)
_INDICES = tuple(index for index, _, _ in _KINDS)
# What they call an index of a variant: of another dtype, for example. A file's is its last part but one.
_VARIANT = re.compile(r"(?<=\.index)\.[^.]+(?=\.json$)")
_SHARD = re.compile(r"-\d+-of-\d+\.")
_OWN = ("converted-", "offloaded-", ".")  # files that this package writes, and unfinished ones
_NUM_SHOWN = 5


class _Stamp(NamedTuple):
    """What tells a file that was replaced or written to from what it was."""

    inode: int
    size_bytes: int
    modified_ns: int

    @classmethod
    def of(cls, path: Path | int) -> "_Stamp":
        found = os.stat(path)
        return cls(found.st_ino, found.st_size, found.st_mtime_ns)


class MappedFile:
    """A file of weights that is mapped into memory: a safetensors file, or one that `torch.save` wrote.

    It stays open: where another file takes its name, as a save into the same folder has it, what was opened is still
    read.

    Args:
        path: Where.

    Attributes:
        path: Where.
        names: Of its tensors.
        in_order: The same, as they lie in the file.

    Raises:
        WeightFilesError: It is missing, cut, or no file of weights.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()  # wherever the process goes afterwards
        try:
            self._file = os.open(path, os.O_RDONLY)
            weakref.finalize(self, os.close, self._file)
            self._stamp = _Stamp.of(self._file)
            # Where each tensor begins; empty where the format hides it.
            self._starts: dict[str, int] = {}
            if path.suffix in PICKLED_SUFFIXES:
                self._tensors = map_pickled(path)
            else:
                with safe_open(
                    path, framework="pt", device="cpu"
                ) as reader:  # checks the header and the size
                    entries = _entries(path)
                    self._starts = {name: entry.start for name, entry in entries.items()}
                    self._tensors = _mapped(self._file, entries, reader)
        except FileNotFoundError as error:
            raise WeightFilesError(f"{path} is missing") from error
        except (SafetensorError, IsADirectoryError) as error:
            raise WeightFilesError(
                f"{path} is no whole safetensors file ({error}): it was cut or damaged; fetch it again"
            ) from error
        except (
            MemoryError,
            RuntimeError,
        ) as error:  # Linux maps no file larger than memory and swap, unless it is told to
            raise WeightFilesError(
                f"{path} cannot be mapped ({error}): store it as several files that are each smaller than the memory"
            ) from error
        self.check_in_place()
        self.in_order = tuple(self._tensors)
        self.names = frozenset(self.in_order)

    def tensor(self, name: str) -> Tensor:
        """A tensor as the file's pages. To write to it changes memory, never the file."""
        return self._tensors[name]

    def start_of(self, name: str) -> int | None:
        """Where a tensor begins in the file, in bytes; None where the format hides it."""
        return self._starts.get(name)

    def tensor_dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor."""
        return self._tensors[name].dtype

    def tensor_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return tuple(self._tensors[name].shape)

    def stamp(self) -> str:
        """Return a text that differs once another file of this path was written."""
        return ":".join(map(str, self._stamp))

    def file_of(self, name: str) -> "MappedFile":  # noqa: ARG002 as the protocol has it
        """Return the file whose pages a tensor is: this one."""
        return self

    def divisible(self, name: str) -> bool:
        """Whether a tensor can be copied piece by piece; what `torch.save` wrote may lie in another order."""
        return name in self._starts or self._tensors[name].is_contiguous()

    def copy(self, name: str, target: Tensor, *, start: int = 0, buffer: Tensor) -> None:
        """Copy elements of a tensor, without its pages becoming part of this process's memory where that can be.

        Args:
            name: The tensor.
            target: Contiguous, of one dim; any device and dtype.
            start: The first element that is copied, counted in the tensor's own order. All, unless it is divisible.
            buffer: Bytes on the CPU, at least as many as are copied, for what another device or dtype needs.

        Raises:
            WeightFilesError: The file ends before.
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
        """Have the system begin to read a part of a tensor that will be copied; nothing where the format hides it.

        Threads that read one file in turns look to the system as if they read here and there: it reads little ahead.

        Args:
            name: The tensor.
            start: The first element of the part.
            size_bytes: Of it.
        """
        if name in self._starts and hasattr(os, "posix_fadvise"):
            begin = self._starts[name] + start * self._tensors[name].element_size()
            os.posix_fadvise(self._file, begin, size_bytes, os.POSIX_FADV_WILLNEED)

    def copy_box(self, name: str, target: Tensor, box: Sequence[tuple[int, int]]) -> None:
        """Copy a part of a tensor, given by begin and end in each dim, through the file's pages."""
        target.copy_(self._tensors[name][tuple(slice(begin, end) for begin, end in box)])

    def _fill(self, memory: memoryview, start: int) -> None:
        while memory:
            count = os.preadv(self._file, [memory], start)
            if not count:
                raise WeightFilesError(f"{self.path} was cut while it was read: fetch it again")
            memory, start = memory[count:], start + count

    def forget(self, address: int, size_bytes: int) -> None:
        """Have the system drop a part of the file from its cache, but for pages that anybody has mapped.

        Args:
            address: Where the part is in memory. Nothing is done where the format hides where that is in the file.
            size_bytes: Of the part.
        """
        known = next((name for name in self._starts if self._tensors[name].nbytes), None)
        if known is not None and hasattr(os, "posix_fadvise"):
            begin = self.tensor(known).data_ptr() - self._starts[known]
            start = max(0, address - begin)
            os.posix_fadvise(self._file, start, address - begin + size_bytes - start, os.POSIX_FADV_DONTNEED)

    def check_unchanged(self) -> None:
        """Check that nobody wrote into the file since it was opened; it may have been deleted or replaced by another.

        Raises:
            WeightFilesError: Somebody did. Of a file that was made shorter, the pages that are gone end the process
                when they are used; nothing can prevent that.
        """
        if _Stamp.of(self._file) != self._stamp:
            raise self._changed()

    def check_in_place(self) -> None:
        """Check that the file of this name is the one that was opened, and as long; its content is not looked at.

        Raises:
            WeightFilesError: It was replaced, deleted or cut.
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
    """Which file holds each tensor of a model's weights, in the order in which they lie there.

    Args:
        checkpoint: A safetensors file or one that `torch.save` wrote, an index of several (`*.safetensors.index.json`
            or `*.bin.index.json`), or a folder that holds one of them; of both kinds, safetensors is taken. A variant
            (`model.fp16.safetensors`, `model.safetensors.index.fp16.json`) is taken if the folder has nothing else.

    Raises:
        WeightFilesError: It is none of them, or a file that it names is missing, damaged, or lacks a tensor.
    """
    return {name: file.path for name, file in open_weights(checkpoint).items()}


def open_weights(checkpoint: Path | str) -> dict[str, MappedFile]:
    """As `find_weights`, with the files opened."""
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
    """Return what to load of a folder: it itself, or the index or file of a variant of its weights.

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
    """The index of a folder, or its one file."""
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
    """What an index says, held against the files."""
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
    """What a header says of a tensor; where it begins is counted from the file's begin."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    size_bytes: int


def _entries(path: Path) -> dict[str, _Entry]:
    """The tensors of a safetensors file, in the order in which they lie there; its header has been checked."""
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
    """The tensors as the file's pages, of which none is read.

    Not by the library's own `get_tensor`, which has the system read each tensor at once (safetensors 0.8).

    Raises:
        MemoryError: The system maps no file of this size.
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
