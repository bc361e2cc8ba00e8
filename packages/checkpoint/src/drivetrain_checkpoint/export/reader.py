"""Read an export as a mapping: names and shapes are known at once, each tensor is read on access."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from drivetrain_checkpoint.errors import CorruptCheckpointError, NoCheckpointError
from drivetrain_checkpoint.export.plan import INDEX, SINGLE_FILE, TensorInfo
from drivetrain_checkpoint.export.writer import TIES
from drivetrain_checkpoint.format.tensor_file import dtype_of
from drivetrain_checkpoint.storage.place import on_disk

# Also with a variant, as diffusers and transformers name it: x.safetensors.index.fp16.json, x.fp16.index.json.
_OTHER_INDEX = re.compile(r"(?!.*\.bin\.index\.).+\.index(\.[^.]+)?\.json")
_SHARD = re.compile(r"-\d{5,}-of-\d{5,}(\.[^.]+)?\.safetensors$")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorLocation:
    """The location of a stored tensor.

    Attributes:
        file: The name of the file.
        name: The name of the tensor in the file.
        info: The shape and dtype of the tensor.
    """

    file: str
    name: str
    info: TensorInfo


class ExportedTensors(Mapping[str, Tensor]):
    """The tensors of an export by name, each read on access.

    Args:
        readers: The open files by name.
        places: The location of each tensor; tied names have the same.

    Attributes:
        places: The location of each tensor.
    """

    def __init__(self, readers: Mapping[str, Any], places: Mapping[str, TensorLocation]) -> None:
        self.places = places
        self._readers = readers

    def renamed(self, sources: Mapping[str, str]) -> Self:
        """Return a selection of the tensors under new names.

        Args:
            sources: The current name for each new name.
        """
        return type(self)(self._readers, {name: self.places[source] for name, source in sources.items()})

    def __getitem__(self, name: str) -> Tensor:
        place = self.places[name]
        return self._readers[place.file].get_tensor(place.name)

    def __contains__(self, name: object) -> bool:
        return name in self.places  # Mapping's default would read the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)


def open_export(folder: Path | str, *, device: torch.device | str = "cpu") -> ExportedTensors:
    """Open an export that `save_model`, transformers' `save_pretrained`, diffusers or safetensors wrote.

    Opens `model.safetensors` if it exists, else `model.safetensors.index.json`, else the only index or file with
    another name, such as `diffusion_pytorch_model.safetensors.index.json`. Checks the headers of all files, and reads
    no tensor yet.

    Args:
        folder: The folder with a safetensors file, or with shards and their index; or the path of a file or index.
        device: The device onto which tensors are read.

    Raises:
        NoCheckpointError: There is no export in the folder.
        CorruptCheckpointError: A file is missing or damaged; the message names it.
        ValueError: The folder holds several exports, none with a default name; the message lists them.
    """
    chosen = _choose(on_disk(folder))
    folder, single = chosen.parent, chosen
    weight_map, ties = {}, {}
    if chosen.suffix == ".json":
        weight_map, ties = _read_index(chosen)
        names = sorted(set(weight_map.values()))
    else:
        names = [chosen.name]
    readers = {name: _open_file(folder / name, device, listed_in=chosen.name) for name in names}
    if not weight_map:
        ties = _ties_of_header(single, readers[single.name].metadata())
    places = {
        name: TensorLocation(file=file, name=name, info=_info(folder / file, name, reader))
        for file, reader in readers.items()
        for name in reader.offset_keys()
        if weight_map.get(name, file) == file
    }
    if lacking := sorted(weight_map.keys() - places.keys()):
        raise CorruptCheckpointError(
            f"{folder / weight_map[lacking[0]]} does not hold {lacking[0]!r}, though {chosen.name} says so; fetch or "
            "save it again"
        )
    for name, stored in ties.items():
        if stored not in places:
            raise CorruptCheckpointError(
                f"{folder}: {name!r} is said to be the same tensor as {stored!r}, which no file holds"
            )
    tied = {name: places[stored] for name, stored in ties.items() if name not in places}
    return ExportedTensors(readers, places | tied)


def open_tensor_file(path: Path | str, *, device: torch.device | str = "cpu") -> ExportedTensors:
    """Open one safetensors file of any name; check its header, and read no tensor yet.

    Args:
        path: The path of the file.
        device: The device onto which tensors are read.

    Raises:
        CorruptCheckpointError: The file is missing or damaged.
    """
    path = Path(path)
    reader = _open_file(path, device, listed_in=None)
    places = {
        name: TensorLocation(file=path.name, name=name, info=_info(path, name, reader))
        for name in reader.offset_keys()
    }
    return ExportedTensors({path.name: reader}, places)


def _read_index(path: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Read the file name of each tensor and the ties from an index.

    Raises:
        CorruptCheckpointError: The index is damaged, or names files outside its folder.
    """
    try:
        index = json.loads(path.read_bytes())
        weight_map = _names_to_names(index["weight_map"])
        ties = _names_to_names((index.get("metadata") or {}).get(TIES, {}))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptCheckpointError(f"{path} is no index of safetensors files: {error!r}") from error
    for file in weight_map.values():
        if Path(file).name != file:
            raise CorruptCheckpointError(f"{path} names {file!r}, which is no file of its folder")
    return weight_map, ties


def _ties_of_header(path: Path, metadata: Mapping[str, str] | None) -> dict[str, str]:
    try:
        return _names_to_names(json.loads((metadata or {}).get(TIES, "{}")))
    except (ValueError, TypeError) as error:
        raise CorruptCheckpointError(f"{path}: {TIES} in its header is damaged: {error!r}") from error


def _names_to_names(value: object) -> dict[str, str]:
    if not isinstance(value, dict):
        raise TypeError(f"{value!r} is no mapping")
    found = cast("dict[object, object]", value)
    if odd := [name for pair in found.items() for name in pair if not isinstance(name, str)]:
        raise TypeError(f"{odd[0]!r} is no name")
    return cast("dict[str, str]", found)


def _choose(path: Path) -> Path:
    """Return the file that holds an export, or the index that lists its files.

    Raises:
        NoCheckpointError: There is no export.
        ValueError: There are several exports, none with a default name.
    """
    if path.is_file():
        return path
    for name in (SINGLE_FILE, INDEX):  # the order of transformers
        if (path / name).is_file():
            return path / name
    files = sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else []
    indices = [file for file in files if _OTHER_INDEX.fullmatch(file.name)]
    listed = {name for index in indices for name in _read_index(index)[0].values()}
    singles = [
        file
        for file in files
        if file.suffix == ".safetensors" and not _SHARD.search(file.name) and file.name not in listed
    ]
    found = [*indices, *singles]
    if len(found) > 1:
        raise ValueError(
            f"{path} holds several exports, {[file.name for file in found]}: name the one to load, "
            f"{str(path / found[0].name)!r}"
        )
    if not found:
        raise NoCheckpointError(
            f"{path} holds neither {SINGLE_FILE} nor {INDEX}, nor another safetensors file or index: name the folder "
            "of an export; if a save into it was killed, save again"
        )
    return found[0]


def _open_file(path: Path, device: torch.device | str, *, listed_in: str | None) -> Any:
    if not path.is_file():
        why = "" if listed_in is None else f", though {listed_in} lists it"
        raise CorruptCheckpointError(f"{path} is missing{why}; fetch or save it again")
    try:
        return safe_open(path, framework="pt", device=str(device))
    except SafetensorError as error:
        raise CorruptCheckpointError(f"{path} is no whole safetensors file: {error}") from error


def _info(path: Path, name: str, reader: Any) -> TensorInfo:
    described = reader.get_slice(name)
    dtype = dtype_of(described.get_dtype())
    if dtype is None:
        raise CorruptCheckpointError(
            f"{path}: {name!r} has the dtype {described.get_dtype()}, which this torch does not have"
        )
    return TensorInfo(shape=tuple(described.get_shape()), dtype=dtype)
