"""Export a model from a checkpoint, however it was sharded, in the layout of Hugging Face's libraries."""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from drivetrain_checkpoint.errors import CorruptCheckpointError
from drivetrain_checkpoint.export.export_plan import ExportPlan, TensorInfo, plan_export
from drivetrain_checkpoint.export.writer import write_export
from drivetrain_checkpoint.format.checksummed_io import BLOCK_BYTES
from drivetrain_checkpoint.format.division import Division
from drivetrain_checkpoint.format.layout import model_part
from drivetrain_checkpoint.format.manifest import Manifest, check_files, read_manifest
from drivetrain_checkpoint.format.state_tree import Json, decode
from drivetrain_checkpoint.loading.part_reader import read_tensors, read_tree
from drivetrain_checkpoint.storage.place import Place, locate, on_disk
from drivetrain_weights.safetensors_layout import DTYPES

logger = logging.getLogger(__name__)


def merge_shards(
    folder: Place | str,
    output: Path | str,
    *,
    model: str | None = None,
    max_shard_size: int | str = "5GB",
    on_bytes: Callable[[int], None] = lambda _: None,
) -> ExportPlan:
    """Write a model of a checkpoint in the form of `save_model`, without building the model.

    Runs in one process, whatever the number of ranks that saved. Only the tensors of one file of the export are in
    memory at a time. Every block is verified when it is read. Names that share a tensor are tied in the export.
    Values other than tensors, such as a module's extra state, are left out; a warning lists them.

    Args:
        folder: The checkpoint's folder or URL.
        output: The folder of the export; an export in it is replaced, see `write_export`.
        model: The name of the model; None for the only one.
        max_shard_size: The largest total size of the tensors in one file, in bytes or as "5GB", "512MiB".
        on_bytes: A function called with the number of bytes of tensors read since the last call.

    Returns:
        The plan of the export that was written.

    Raises:
        CorruptCheckpointError: The checkpoint is damaged; the message names the file, and nothing was written.
        StateError: A tensor cannot be exported.
        ValueError: The checkpoint has no such model, the size is invalid, or `output` is the checkpoint's folder.
    """
    place = locate(folder)
    if place == on_disk(output).absolute():
        raise ValueError(f"output={str(output)!r}: is the checkpoint itself; name another folder")
    manifest = read_manifest(place)
    check_files(place, manifest)
    chosen = choose_model(manifest, model)
    names = names_in(read_tree(place, manifest, model_part(chosen), on_block=lambda: None))
    if names.others:
        logger.warning(
            "left out of the export, which holds only tensors: %s", ", ".join(map(repr, names.others))
        )
    plan = plan_names(names, manifest.tensors[model_part(chosen)], max_shard_size=max_shard_size)

    def read() -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors in the plan's order. Read one file's tensors at a time; release a tensor once yielded."""
        for in_file in plan.files.values():
            count = _Count(sum(plan.tensors[name].size_bytes for name in in_file), on_bytes)
            wanted = [names.stored[name] for name in in_file]
            tensors = read_tensors(place, manifest, model_part(chosen), wanted, on_block=count.block)
            count.rest()
            for name in in_file:
                yield name, tensors.pop(names.stored[name])

    write_export(plan, read(), output)
    return plan


def choose_model(manifest: Manifest, model: str | None) -> str:
    """Return the name of the chosen model; if `model` is None, that of the checkpoint's only model."""
    names = ", ".join(manifest.models) or "none"
    if model is None and len(manifest.models) == 1:
        return manifest.models[0]
    if model in manifest.models:
        return model
    raise ValueError(f"model={model!r}: must name a model of the checkpoint, which has {names}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelNames:
    """The names of the entries in a model's state."""

    stored: Mapping[str, str]  # the stored name of each tensor, by its name in the state
    others: tuple[str, ...]


def names_in(tree: Json) -> ModelNames:
    """Return the names of the entries in a model's tagged JSON. Pure."""
    stored: dict[str, str] = {}
    others: list[str] = []
    content = cast("dict[str, Any]", tree)
    is_tagged = "$dict" in content  # some keys are no plain strings
    pairs = [(decode(key, {}), value) for key, value in content["$dict"]] if is_tagged else content.items()
    for name, value in pairs:
        if isinstance(value, dict) and isinstance(value.get("$tensor"), str):
            stored[name] = cast("str", value["$tensor"])
        else:
            others.append(name)
    return ModelNames(stored=stored, others=tuple(others))


def plan_names(
    names: ModelNames, tensors: Mapping[str, Division], *, max_shard_size: int | str
) -> ExportPlan:
    """Plan the export of a model; names that share a stored tensor are tied to the first of them. Pure."""
    first: dict[str, str] = {}
    described: dict[str, TensorInfo] = {}
    for name, stored in names.stored.items():
        first.setdefault(stored, name)
        if stored not in tensors:
            raise CorruptCheckpointError(
                f"the model's state names {stored!r}, which the manifest does not list"
            )
        tensor = tensors[stored]
        if (dtype := DTYPES.get(tensor.dtype)) is None:
            raise CorruptCheckpointError(
                f"{stored!r} has the dtype {tensor.dtype}, which this torch does not have: use a newer torch"
            )
        described[name] = TensorInfo(shape=tensor.shape, dtype=dtype)
    return plan_export(
        described,
        max_shard_size=max_shard_size,
        ties={name: first[stored] for name, stored in names.stored.items() if first[stored] != name},
    )


class _Count:
    """A counter that reports blocks as bytes of tensors, though a block may hold fewer bytes or repeat some."""

    def __init__(self, num_bytes: int, on_bytes: Callable[[int], None]) -> None:
        self._left = num_bytes
        self._on_bytes = on_bytes

    def block(self) -> None:
        num_bytes = min(BLOCK_BYTES, self._left)
        self._left -= num_bytes
        self._on_bytes(num_bytes)

    def rest(self) -> None:
        self._on_bytes(self._left)
