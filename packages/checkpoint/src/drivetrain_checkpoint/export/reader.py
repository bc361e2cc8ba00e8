"""An export as a mapping: names and shapes are known, each tensor is read when it is asked for."""

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
from drivetrain_checkpoint.storage.base import on_disk

# With a variant's name, as diffusers and transformers put it: x.safetensors.index.fp16.json, x.fp16.index.json.
_OTHER_INDEX = re.compile(r"(?!.*\.bin\.index\.).+\.index(\.[^.]+)?\.json")
_SHARD = re.compile(r"-\d{5,}-of-\d{5,}(\.[^.]+)?\.safetensors$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a tensor is stored.

    Attributes:
        file: The name of its file.
        name: What it is called there.
        info: Its shape and dtype.
    """

    file: str
    name: str
    info: TensorInfo


class ExportedTensors(Mapping[str, Tensor]):
    """The tensors of an export, each read when it is asked for.

    Args:
        readers: The files by their names.
        places: Where each tensor is. Tied ones are at one place.

    Attributes:
        places: The same.
    """

    def __init__(self, readers: Mapping[str, Any], places: Mapping[str, Place]) -> None:
        self.places = places
        self._readers = readers

    def renamed(self, sources: Mapping[str, str]) -> Self:
        """Some of the tensors under other names: new name to the name here."""
        return type(self)(self._readers, {name: self.places[source] for name, source in sources.items()})

    def __getitem__(self, name: str) -> Tensor:
        place = self.places[name]
        return self._readers[place.file].get_tensor(place.name)

    def __contains__(self, name: object) -> bool:
        return name in self.places  # Mapping's own would read it

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)


def open_export(folder: Path | str, *, device: torch.device | str = "cpu") -> ExportedTensors:
    """Open what `save_model`, transformers' `save_pretrained`, diffusers or safetensors wrote into a folder.

    `model.safetensors` is taken, or else `model.safetensors.index.json`; or else the one index or file of another
    name, such as `diffusion_pytorch_model.safetensors.index.json`. The headers of all files are checked; of the
    tensors nothing is read yet.

    Args:
        folder: It holds a safetensors file, or shards and their index. Or the path of such a file or index.
        device: Where tensors are read to.

    Raises:
        NoCheckpointError: There is no export in the folder.
        CorruptCheckpointError: A file is missing or damaged; the message names it.
        ValueError: There are several, none of them of the usual name; the message lists them.
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
        name: Place(file=file, name=name, info=_info(folder / file, name, reader))
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
    """Open one safetensors file, of whatever name; its header is checked, of the tensors nothing is read yet.

    Args:
        path: The file.
        device: Where tensors are read to.

    Raises:
        CorruptCheckpointError: It is missing or damaged.
    """
    path = Path(path)
    reader = _open_file(path, device, listed_in=None)
    places = {
        name: Place(file=path.name, name=name, info=_info(path, name, reader))
        for name in reader.offset_keys()
    }
    return ExportedTensors({path.name: reader}, places)


def _read_index(path: Path) -> tuple[dict[str, str], dict[str, str]]:
    """The file of each tensor, and the ties.

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
    """The file that holds an export, or the index that lists its files.

    Raises:
        NoCheckpointError: There is none.
        ValueError: There are several, and none is what readers look for first.
    """
    if path.is_file():
        return path
    for name in (SINGLE_FILE, INDEX):  # in the order in which transformers looks for them
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
