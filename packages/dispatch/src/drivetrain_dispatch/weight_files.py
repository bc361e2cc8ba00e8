"""The files of a model's weights, as safetensors and Hugging Face's libraries lay them out.

A tensor of such a file is the file's pages: it takes no memory of its own, and nothing is read before it is used.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from torch import Tensor

from drivetrain_dispatch.errors import WeightFilesError

_INDEX = ".safetensors.index.json"
_SUFFIX = ".safetensors"
_SINGLE = "model.safetensors"
_NUM_SHOWN = 5


class _Stamp(NamedTuple):
    """By what a file that was replaced or written to is told."""

    inode: int
    size_bytes: int
    modified_ns: int

    @classmethod
    def of(cls, path: Path) -> "_Stamp":
        found = path.stat()
        return cls(found.st_ino, found.st_size, found.st_mtime_ns)


class MappedFile:
    """A safetensors file that is mapped into memory.

    Args:
        path: Where.

    Attributes:
        path: Where.
        names: Of its tensors.

    Raises:
        WeightFilesError: It is missing, cut, or no safetensors file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._stamp = _Stamp.of(path)
            self._reader: Any = safe_open(
                path, framework="pt", device="cpu"
            )  # checks the header and the size
        except FileNotFoundError as error:
            raise WeightFilesError(f"{path} is missing") from error
        except (SafetensorError, IsADirectoryError) as error:
            raise WeightFilesError(
                f"{path} is no whole safetensors file ({error}): it was cut or damaged; fetch it again"
            ) from error
        self.names = frozenset(self._reader.keys())

    def tensor(self, name: str) -> Tensor:
        """A tensor as the file's pages. To write to it changes memory, never the file."""
        return self._reader.get_tensor(name)

    def check_unchanged(self) -> None:
        """Check that it is the file that was opened.

        Raises:
            WeightFilesError: It was replaced, written to or deleted. Of a file that was made shorter, the pages that
                are gone end the process when they are used; nothing can prevent that.
        """
        try:
            same = _Stamp.of(self.path) == self._stamp
        except FileNotFoundError:
            same = False
        if not same:
            raise WeightFilesError(
                f"{self.path} has changed since the model was loaded from it: load the model again, and write new "
                "weights into new files"
            )


def find_weights(checkpoint: Path | str) -> dict[str, Path]:
    """Which file holds each tensor of a model's weights.

    Args:
        checkpoint: A safetensors file, an index of several (`*.safetensors.index.json`), or a folder that holds one
            of them.

    Raises:
        WeightFilesError: It is none of them, or a file that it names is missing, damaged, or lacks a tensor.
    """
    path = Path(checkpoint).expanduser()
    if path.is_dir():
        path = _in_folder(path)
    if path.name.endswith(_INDEX):
        return _indexed(path)
    if path.suffix != _SUFFIX:
        raise WeightFilesError(
            f"{path} is no model's weights: name a .safetensors file, an index *{_INDEX}, or a folder that holds one"
        )
    return dict.fromkeys(sorted(MappedFile(path).names), path)


def _in_folder(folder: Path) -> Path:
    """The index of a folder, or its one file."""
    indices = sorted(folder.glob(f"*{_INDEX}"))
    files = sorted(folder.glob(f"*{_SUFFIX}"))
    if len(indices) == 1:
        return indices[0]
    if not indices and (folder / _SINGLE).is_file():
        return folder / _SINGLE
    if not indices and len(files) == 1:
        return files[0]
    found = ", ".join(path.name for path in (indices or files)[:_NUM_SHOWN])
    raise WeightFilesError(
        f"{folder} holds {f'several weights ({found}): name one of them' if found else f'no *{_SUFFIX} file'}"
    )


def _indexed(index: Path) -> dict[str, Path]:
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
    held: dict[str, frozenset[str]] = {}
    for file in sorted(set(names.values())):
        if Path(file).name != file:
            raise WeightFilesError(f"{index} names the file {file!r}: must be one beside it")
        held[file] = MappedFile(index.parent / file).names
    if lacking := sorted(name for name, file in names.items() if name not in held[file]):
        more = f" and {len(lacking) - _NUM_SHOWN} more" if len(lacking) > _NUM_SHOWN else ""
        raise WeightFilesError(
            f"{index} names tensors that their files do not hold: "
            f"{', '.join(f'{name!r} ({names[name]})' for name in lacking[:_NUM_SHOWN])}{more}"
        )
    return {name: index.parent / file for name, file in names.items()}
