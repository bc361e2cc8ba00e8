"""Read an export as a mapping: names and shapes are read at once, and a tensor when it is accessed."""

from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self, cast

import torch
from torch import Tensor

from drivetrain_checkpoint.errors import CorruptCheckpointError, NoCheckpointError
from drivetrain_checkpoint.export.export_plan import TensorInfo
from drivetrain_checkpoint.export.writer import TIES
from drivetrain_checkpoint.storage.place import on_disk
from drivetrain_weights import MappedFile, NoWeightsError, SeveralWeightsError, WeightFilesError, read_index
from drivetrain_weights.regular_file import parse_json
from drivetrain_weights.weight_index import SAFETENSORS_SUFFIX, choose_weights, open_indexed


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorLocation:
    """The location of a stored tensor."""

    file: str
    name: str
    info: TensorInfo


class ExportedTensors(Mapping[str, Tensor]):
    """The tensors of an export by name; a tensor is read when it is accessed.

    Args:
        places: The location of each tensor; tied names have the same location.

    Attributes:
        places: The location of each tensor.
    """

    def __init__(
        self,
        files: Mapping[str, MappedFile],
        places: Mapping[str, TensorLocation],
        device: torch.device | str,
    ) -> None:
        self.places = places
        self._files, self._device = files, device

    def renamed(self, sources: Mapping[str, str]) -> Self:
        """Return a selection of the tensors under new names."""
        return type(self)(
            self._files, {name: self.places[source] for name, source in sources.items()}, self._device
        )

    def __getitem__(self, name: str) -> Tensor:
        place = self.places[name]
        return self._files[place.file].tensor(place.name).to(self._device)

    def __contains__(self, name: object) -> bool:
        return name in self.places  # Mapping's default would read the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)


def open_export(folder: Path | str, *, device: torch.device | str = "cpu") -> ExportedTensors:
    """Open an export that `save_model`, transformers' `save_pretrained`, diffusers or safetensors wrote.

    Opens `model.safetensors` if it exists, else `model.safetensors.index.json`, else the only index or file with
    another name, such as `diffusion_pytorch_model.safetensors.index.json`. Checks the headers of all files, but reads
    no tensors.

    Args:
        folder: The folder with a safetensors file, or with shards and their index; or the path of a file or index.
        device: The device onto which tensors are read.

    Raises:
        NoCheckpointError: There is no export in the folder.
        CorruptCheckpointError: A file is missing or damaged; the message names it.
        ValueError: The folder holds several exports, none with a default name; the message lists them.
    """
    path = on_disk(folder)
    with checkpoint_errors():
        chosen = path if path.is_file() else choose_weights(path, kinds=[SAFETENSORS_SUFFIX])
        if chosen.suffix == ".json":
            index = read_index(chosen)
            said, where = index.metadata.get(TIES, {}), f"{chosen}: {TIES} in its metadata"
            stored = open_indexed(chosen, index, unlisted=True)
        else:
            file = MappedFile(chosen)
            said, where = file.metadata.get(TIES, "{}"), f"{chosen}: {TIES} in its header"
            stored = dict.fromkeys(file.in_order, file)
        exported = _exported(stored, device)
        told: object = parse_json(said, where=where) if isinstance(said, str) else said
    if not isinstance(told, dict) or not all(isinstance(name, str) for pair in told.items() for name in pair):
        raise CorruptCheckpointError(f"{where} is damaged: {told!r} is no mapping of names")
    ties = cast("dict[str, str]", told)
    for name, first in ties.items():
        if first not in stored:
            raise CorruptCheckpointError(
                f"{chosen.parent}: {name!r} is said to be the same tensor as {first!r}, which no file holds"
            )
    return exported.renamed(
        {name: name for name in stored} | {name: first for name, first in ties.items() if name not in stored}
    )


def open_tensor_file(path: Path | str, *, device: torch.device | str = "cpu") -> ExportedTensors:
    """Open one safetensors file of any name; check its header, but read no tensors."""
    with checkpoint_errors():
        file = MappedFile(Path(path))
    return _exported(dict.fromkeys(file.in_order, file), device)


@contextmanager
def checkpoint_errors() -> Generator[None]:
    """Run the block and raise the errors of weight files as errors of checkpoints."""
    try:
        yield
    except SeveralWeightsError:
        raise
    except NoWeightsError as error:
        raise NoCheckpointError(str(error)) from error
    except WeightFilesError as error:
        raise CorruptCheckpointError(str(error)) from error


def _exported(stored: Mapping[str, MappedFile], device: torch.device | str) -> ExportedTensors:
    places = {
        name: TensorLocation(
            file=file.path.name,
            name=name,
            info=TensorInfo(shape=file.tensor_shape(name), dtype=file.tensor_dtype(name)),
        )
        for name, file in stored.items()
    }
    return ExportedTensors({file.path.name: file for file in stored.values()}, places, device)
