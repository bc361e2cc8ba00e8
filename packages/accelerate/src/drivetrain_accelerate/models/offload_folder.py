"""Folders of offloaded weights in Accelerate's format: one file of values for each weight, and index.json."""

import json
import mmap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain_accelerate.models.module_tensors import set_module_tensor_to_device
from drivetrain_weights import MappedFile, WeightFilesError
from drivetrain_weights.regular_file import read_json
from drivetrain_weights.safetensors_layout import bytes_of

INDEX = "index.json"
# What an index says of a weight: its dtype and shape, or the safetensors file that holds it and its name there.
Entry = dict[str, Any]


class ValuesFile(MappedFile):
    """A memory-mapped file that holds only the values of one tensor."""

    def __init__(self, path: Path, name: str, entry: Entry) -> None:
        self._name, self._entry = name, entry
        super().__init__(path)

    def _map(self, path: Path) -> dict[str, Tensor]:
        dtype, shape = find_dtype(self._entry["dtype"]), tuple(self._entry["shape"])
        values = torch.empty(shape, dtype=dtype, device="meta")
        if path.stat().st_size < values.nbytes:
            raise WeightFilesError(
                f"{path} is shorter than the {values.nbytes} bytes that {INDEX} says: write it again"
            )
        if not values.numel():
            return {self._name: torch.empty(shape, dtype=dtype)}
        self._starts = {self._name: 0}
        pages = mmap.mmap(self._file, 0, access=mmap.ACCESS_COPY)
        return {self._name: torch.frombuffer(pages, dtype=dtype, count=values.numel()).view(shape)}


def find_dtype(name: str) -> torch.dtype:
    """Return the dtype for a name in an index, such as "bfloat16"."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise WeightFilesError(f"{INDEX} says dtype {name!r}, which this torch does not have")
    return found


def offload_weight(
    weight: Tensor,
    weight_name: str,
    offload_folder: str | PathLike[str],
    index: dict[str, Entry] | None = None,
) -> dict[str, Entry] | None:
    """Write the values of a weight to a file; add the weight to `index` if given."""
    values = weight.detach().to("cpu").contiguous()
    path = Path(offload_folder) / f"{weight_name}.dat"
    path.unlink(missing_ok=True)  # what another process has mapped stays as it is
    path.write_bytes(bytes_of(values.reshape(-1)))
    if index is not None:
        index[weight_name] = {"dtype": str(values.dtype).removeprefix("torch."), "shape": list(values.shape)}
    return index


def load_offloaded_weight(weight_file: str | PathLike[str], weight_info: Entry) -> Tensor:
    """Return the weight in a file of values, memory-mapped."""
    return ValuesFile(Path(weight_file), "", weight_info).tensor("")


def save_offload_index(index: dict[str, Entry] | None, offload_folder: str | PathLike[str]) -> None:
    """Add entries to the index of a folder; without an index, write one."""
    if not index:
        return
    text = json.dumps({**read_offload_index(offload_folder), **index}, indent=2)
    (Path(offload_folder) / INDEX).write_text(text, encoding="utf-8")


def read_offload_index(folder: str | PathLike[str]) -> dict[str, Entry]:
    """Return the index of a folder; an empty index if the folder has none."""
    path = Path(folder) / INDEX
    return read_json(path) if path.exists() else {}


def offload_state_dict(save_dir: str | PathLike[str], state_dict: dict[str, Tensor]) -> None:
    """Write the weights of a state dict to a folder, with their index."""
    Path(save_dir).mkdir(parents=True, exist_ok=True)
    index: dict[str, Entry] = {}
    for name, weight in state_dict.items():
        offload_weight(weight, name, save_dir, index)
    save_offload_index(index, save_dir)


@dataclass(eq=False, repr=False)
class PrefixedDataset(Mapping[str, Tensor]):
    """A view of the entries of a mapping whose names begin with a prefix; keys are read without the prefix."""

    dataset: Mapping[str, Tensor]
    prefix: str

    def __getitem__(self, key: str) -> Tensor:
        return self.dataset[f"{self.prefix}{key}"]

    def __iter__(self) -> Iterator[str]:
        """Yield the names with their prefix, as Accelerate does."""
        return (name for name in self.dataset if name.startswith(self.prefix))

    def __len__(self) -> int:
        """Return the number of names that begin with the prefix."""
        return sum(1 for _ in self)


class OffloadedWeightsLoader(Mapping[str, Tensor]):
    """The weights of a state dict, an offload folder or an index, by name. A weight is read when it is used."""

    def __init__(
        self,
        state_dict: dict[str, Tensor] | None = None,
        save_folder: str | PathLike[str] | None = None,
        index: Mapping[str, Entry] | None = None,
        device: Any = None,
    ) -> None:
        if state_dict is None and save_folder is None and index is None:
            raise ValueError(
                "OffloadedWeightsLoader() without weights: pass state_dict=, save_folder= or index="
            )
        self.state_dict = {} if state_dict is None else state_dict
        self.save_folder = save_folder
        if index is None and save_folder is not None:
            index = read_offload_index(save_folder)
        self.index = dict(index or {})
        self.all_keys = [*self.state_dict, *(name for name in self.index if name not in self.state_dict)]
        self.device = device
        self._files: dict[Path, MappedFile] = {}

    def __getitem__(self, key: str) -> Tensor:
        if key in self.state_dict:
            return self.state_dict[key]
        file, name = self.file_of(key)
        weight = file.tensor(name)
        wanted = self.index[key].get("dtype")
        weight = weight if wanted is None else weight.to(find_dtype(str(wanted)))
        return weight if self.device is None else weight.to(self.device)

    def file_of(self, key: str) -> tuple[MappedFile, str]:
        """Return the file of a weight that is not in memory, and the weight's name in the file."""
        entry = self.index[key]
        stored = entry.get("safetensors_file")
        if stored is None:
            return ValuesFile(Path(self.save_folder or "") / f"{key}.dat", key, entry), key
        path = Path(stored)
        if path not in self._files:
            self._files[path] = MappedFile(path)
        return self._files[path], entry.get("weight_name", key)

    def __iter__(self) -> Iterator[str]:
        return iter(self.all_keys)

    def __len__(self) -> int:
        return len(self.all_keys)


def load_offloaded_weights(
    model: nn.Module, index: dict[str, Entry] | None, offload_folder: str | PathLike[str]
) -> None:
    """Read the weights of an offload folder into a model, in host memory."""
    if not index:
        return
    for name, value in OffloadedWeightsLoader(save_folder=offload_folder, index=index).items():
        set_module_tensor_to_device(model, name, "cpu", value=value)


def extract_submodules_state_dict(
    state_dict: dict[str, Tensor], submodule_names: list[str]
) -> dict[str, Tensor]:
    """Return the part of a state dict that belongs to some modules."""
    prefixes = tuple(f"{name}." for name in submodule_names)
    return {
        name: value
        for name, value in state_dict.items()
        if name in submodule_names or name.startswith(prefixes)
    }
