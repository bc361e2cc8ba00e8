"""The files of a model's weights, as safetensors, torch and Hugging Face's libraries lay them out in a folder."""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from drivetrain_messages import list_some
from drivetrain_weights.errors import NoWeightsError, SeveralWeightsError, WeightFilesError
from drivetrain_weights.mapped_file import MappedFile
from drivetrain_weights.regular_file import read_json
from drivetrain_weights.torch_file import TORCH_SUFFIXES

SAFETENSORS_SUFFIX = ".safetensors"
# What transformers and diffusers call a model's weights: one file, or the index of several.
_USUAL = {
    SAFETENSORS_SUFFIX: ("model", "diffusion_pytorch_model"),
    ".bin": ("pytorch_model", "diffusion_pytorch_model"),
}
_SUFFIXES = {SAFETENSORS_SUFFIX: (SAFETENSORS_SUFFIX,), ".bin": TORCH_SUFFIXES}
# Also with a variant, such as another dtype: model.safetensors.index.fp16.json, model.fp16.safetensors.index.json.
_INDEX = re.compile(r".+\.index(\.[^.]+)?\.json")
_SHARD = re.compile(r"-(\d+)-of-(\d+)(\.[^.]+)?\.[^.]+$")
# Prefixes of files that drivetrain-dispatch writes, and of unfinished ones.
_OWN = ("converted-", "offloaded-", ".")
_NUM_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightIndex:
    """An index of the files that hold a model's weights.

    Attributes:
        weight_map: The name of each tensor's file, in the folder of the index.
        metadata: The other entries of the index, such as `{"total_size": 1000}`.
    """

    weight_map: Mapping[str, str]
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def to_json(self) -> str:
        """Return the text of an index as Hugging Face's libraries read it."""
        said = {"metadata": dict(self.metadata), "weight_map": dict(self.weight_map)}
        return json.dumps(said, indent=2) + "\n"


def read_index(path: Path) -> WeightIndex:
    """Read an index of safetensors or torch files.

    Raises:
        WeightFilesError: The index is missing or damaged, or names files outside its folder.
    """
    try:
        said: Any = read_json(path)
    except FileNotFoundError as error:
        raise WeightFilesError(f"{path} is missing") from error
    has_parts = isinstance(said, dict) and "weight_map" in said
    files = said["weight_map"] if has_parts else said
    is_map = isinstance(files, dict) and all(isinstance(file, str) for file in files.values())
    if not is_map or not (files or has_parts):
        raise WeightFilesError(
            f'{path} is no index of weight files: it has no "weight_map" from tensors to files, and is no such map'
        )
    metadata = (said.get("metadata") if has_parts else None) or {}
    if not isinstance(metadata, dict):
        raise WeightFilesError(f'{path} is no index of weight files: its "metadata" is {metadata!r}')
    for file in files.values():
        if Path(file).name != file:
            raise WeightFilesError(f"{path} names the file {file!r}: must be a file in the same folder")
    return WeightIndex(weight_map=cast("Mapping[str, str]", files), metadata=metadata)


def open_weights(checkpoint: Path | str) -> dict[str, MappedFile]:
    """Open the files of a model's weights, and return a dict from tensor names to files, in the files' order.

    Args:
        checkpoint: A safetensors file, a file of `torch.save`, an index of several files (`*.safetensors.index.json`
            or `*.bin.index.json`), or a folder with one of these; see `choose_weights`.

    Raises:
        WeightFilesError: The checkpoint is none of these, or a file is missing, damaged, or lacks a tensor.
    """
    path = Path(checkpoint).expanduser()
    if path.is_dir():
        path = choose_weights(path)
    if path.suffix == ".json":
        return open_indexed(path, read_index(path))
    if path.suffix not in (SAFETENSORS_SUFFIX, *TORCH_SUFFIXES):
        raise WeightFilesError(
            f"{path} is no model's weights: name a {SAFETENSORS_SUFFIX} file, one of {', '.join(TORCH_SUFFIXES)} "
            f"that torch.save wrote, an index *{SAFETENSORS_SUFFIX}.index.json or *.bin.index.json, or a folder that "
            "holds one"
        )
    file = MappedFile(path)
    return dict.fromkeys(file.in_order, file)


def open_indexed(path: Path, index: WeightIndex, *, unlisted: bool = False) -> dict[str, MappedFile]:
    """Open the files of an index, and return the file of each tensor. `unlisted` adds tensors not in the index."""
    held: dict[str, MappedFile] = {}
    for file in sorted(set(index.weight_map.values())):
        if not (path.parent / file).exists():
            raise WeightFilesError(
                f"{path.parent / file} is missing, though {path.name} lists it: fetch or save it again"
            )
        held[file] = MappedFile(path.parent / file)
    places = index.weight_map
    if lacking := sorted(name for name, file in places.items() if name not in held[file].names):
        absent = list_some((f"{name!r} ({places[name]})" for name in lacking), most=_NUM_SHOWN)
        raise WeightFilesError(f"{path} names tensors that their files do not hold: {absent}")
    return {
        name: opened
        for file, opened in held.items()
        for name in opened.in_order
        if places.get(name, file if unlisted else None) == file
    }


def choose_weights(folder: Path, *, kinds: Iterable[str] = tuple(_SUFFIXES)) -> Path:
    """Return a folder's file of weights, or its index of several files; `kinds` are in order of preference.

    A file or index with the usual name of transformers or diffusers comes first. The second choice is the only other
    index or file, such as a variant (`model.fp16.safetensors`).

    Raises:
        NoWeightsError: The folder holds no weights, or only shards without their index.
        SeveralWeightsError: The folder holds several files of weights, none with a usual name.
    """
    paths = [path for path in folder.iterdir() if not path.name.startswith(_OWN)] if folder.is_dir() else []
    shards: list[Path] = []
    for kind in kinds:
        for name in _USUAL[kind]:
            for usual in (folder / f"{name}{kind}", folder / f"{name}{kind}.index.json"):
                if usual.exists():  # what is there and no file is refused by name, not passed over
                    return usual
        found, unlisted = _find_others(sorted(paths), kind)
        shards = shards or unlisted
        if len(found) == 1:
            return found[0]
        if found:
            shown = ", ".join(path.name for path in found[:_NUM_SHOWN])
            raise SeveralWeightsError(f"{folder} holds several weights ({shown}): name one of them")
    if shards:
        raise NoWeightsError(
            f"{folder} holds {len(shards)} shards, {shards[0].name} and so on, and no "
            f"*{shards[0].suffix}.index.json that says what is where: fetch it too; if a save into the "
            "folder was killed, save again"
        )
    looked_for = ", ".join(f"*{suffix}" for kind in kinds for suffix in _SUFFIXES[kind])
    raise NoWeightsError(
        f"{folder} holds no weights, none of {looked_for}: fetch them too; if a save into it was killed, save again"
    )


def find_variant(folder: Path, variant: str | None) -> Path:
    """Return the path to load from: the folder itself, or the index or file of a variant in the folder."""
    if variant is None:
        return folder
    files = (f"*.{variant}{suffix}" for suffix in (SAFETENSORS_SUFFIX, *TORCH_SUFFIXES))
    for pattern in (f"*.index.{variant}.json", *files):
        if found := sorted(path for path in folder.glob(pattern) if not _SHARD.search(path.name)):
            return found[0]
    raise NoWeightsError(
        f"variant={variant!r}: {folder} holds no weights of that variant; leave it out, or fetch them"
    )


def _find_others(paths: Iterable[Path], kind: str) -> tuple[list[Path], list[Path]]:
    """Return the indices of a kind with the files that no index lists, and the shards among these files."""
    files = [path for path in paths if path.suffix in _SUFFIXES[kind] and path.is_file()]
    indices: dict[Path, WeightIndex] = {}
    for path in paths:
        if _INDEX.fullmatch(path.name) and (index := _read_index_of(path, kind)) is not None:
            indices[path] = index
    listed = {file for index in indices.values() for file in index.weight_map.values()}
    rest = [path for path in files if path.name not in listed]
    shards = [path for path in rest if (match := _SHARD.search(path.name)) and int(match[2]) > 1]
    return [*indices, *(path for path in rest if path not in shards)], shards


def _read_index_of(path: Path, kind: str) -> WeightIndex | None:
    """Read an index of files of a kind; return None for other JSON, such as TensorFlow's indices."""
    try:
        index = read_index(path)
    except WeightFilesError:
        if f"{kind}." in path.name:
            raise
        return None
    suffixes = {Path(file).suffix for file in index.weight_map.values()}
    return index if suffixes and suffixes <= set(_SUFFIXES[kind]) else None
