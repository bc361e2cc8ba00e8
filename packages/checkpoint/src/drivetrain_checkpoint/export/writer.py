"""Export models for other programs: as one safetensors file, or as shards with an index, in Hugging Face's layout.

```text
model.safetensors                                    all tensors, if they fit into one file
model-00001-of-00002.safetensors, model-00002-of-... the tensors in several files
model.safetensors.index.json                         which file holds which tensor
```

A tensor with several names is stored under the first. The key "tied_weights" maps the others to it: as JSON in the
header of a single file, or in the `metadata` of the index. Readers that do not know the key tie weights themselves.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from drivetrain_checkpoint.errors import StateError
from drivetrain_checkpoint.export.export_plan import INDEX, SHARD_FILE, SINGLE_FILE, ExportPlan, plan_export
from drivetrain_checkpoint.storage.local import sync_folder
from drivetrain_checkpoint.storage.place import on_disk
from drivetrain_weights import WeightIndex, find_ties

TIES = "tied_weights"
_UNFINISHED = ".tmp"
_OWN_METADATA = ("format", TIES)


def save_model(
    model: nn.Module | Mapping[str, Tensor],
    folder: Path | str,
    *,
    max_shard_size: int | str = "5GB",
    metadata: Mapping[str, str] | None = None,
) -> ExportPlan:
    """Write a model in the layout that `from_pretrained` and other readers of safetensors expect.

    To write tensors one at a time, see `plan_export` and `write_export`.

    Args:
        model: A module, or whole tensors by name. Tensors that are the same memory are stored once; views that
            overlap but differ are each stored in full.
        folder: The folder of the export, created if missing. An export in it is replaced, see `write_export`.
        max_shard_size: The largest total size of the tensors in one file, in bytes or as "5GB", "512MiB".
        metadata: Strings to add to the header of every file, beside `{"format": "pt"}`.

    Returns:
        The plan of the export that was written.

    Raises:
        StateError: A tensor cannot be stored; nothing was written.
        ValueError: The size is invalid, or `metadata` has a reserved key.
    """
    tensors: Mapping[str, Tensor] = model.state_dict() if isinstance(model, nn.Module) else model
    for name, tensor in tensors.items():
        if isinstance(tensor, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance] the plan refuses others
            _check_whole(name, tensor)
    known = {name: tensor for name, tensor in tensors.items() if hasattr(tensor, "layout")}
    plan = plan_export(tensors, max_shard_size=max_shard_size, ties=find_ties(known))
    write_export(plan, tensors.items(), folder, metadata=metadata)
    return plan


def write_export(
    plan: ExportPlan,
    tensors: Iterable[tuple[str, Tensor]],
    folder: Path | str,
    *,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write the planned tensors from an iterable, holding those of one file at a time.

    All files are written under temporary names and synced to the disk before they replace an earlier export in the
    folder: until then, an error or a kill leaves the earlier export untouched. If the process is killed during the
    brief renames, the folder holds either the earlier export or the new one, never a mixture. If both have the same
    file names, the export may be unreadable then. Saving again repairs the folder and deletes leftovers.

    Args:
        plan: The plan, as `plan_export` returns it.
        tensors: Pairs of a name and a whole tensor, on any device and with any strides, in the plan's order. Names
            that the plan ties may be included, and are skipped.
        folder: The folder of the export, created if missing.
        metadata: Strings to add to the header of every file, beside `{"format": "pt"}`.

    Raises:
        StateError: A tensor differs from the plan, or cannot be stored.
        ValueError: The names differ from the plan's, or `metadata` has a reserved key.
        NotADirectoryError: The folder is a file.
    """
    folder = on_disk(folder)
    header = _header(plan, metadata)
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"{folder} is a file: name the folder that the export goes into")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        _write_files(plan, iter(tensors), folder, header)
        if plan.is_sharded:
            about = {"total_size": plan.total_size} | ({TIES: dict(plan.ties)} if plan.ties else {})
            index = WeightIndex(weight_map=plan.weight_map, metadata=about)
            with (folder / f"{INDEX}{_UNFINISHED}").open("w", encoding="utf-8") as file:
                file.write(index.to_json())
                file.flush()
                os.fsync(file.fileno())
        sync_folder(folder)
    except BaseException:
        _delete_unfinished(folder)
        raise
    _replace(plan, folder)


def write_tensor_file(
    path: Path | str, tensors: Mapping[str, Tensor], *, metadata: Mapping[str, str] | None = None
) -> None:
    """Write one safetensors file of any name. It replaces an earlier file once the new file is on the disk.

    Args:
        path: The path of the file, in an existing folder.
        tensors: The whole tensors by name, on any device.
        metadata: Strings to add to the header, beside `{"format": "pt"}`.

    Raises:
        StateError: A tensor cannot be stored; nothing was written.
    """
    path = on_disk(path)
    plan = plan_export(tensors)
    memory: set[int] = set()
    staged = {name: _staged(name, tensor, plan, memory) for name, tensor in tensors.items()}
    unfinished = path.with_name(f"{path.name}{_UNFINISHED}")
    try:
        _write_file(unfinished, staged, {"format": "pt", **(metadata or {})})
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    sync_folder(path.parent)


def _header(plan: ExportPlan, metadata: Mapping[str, str] | None) -> dict[str, str]:
    """Return the metadata for the header of every file."""
    given = dict(metadata or {})
    for key, value in given.items():
        if key in _OWN_METADATA or not isinstance(key, str) or not isinstance(value, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(
                f"metadata[{key!r}] = {value!r}: both must be strings, the key none of {_OWN_METADATA}, which are "
                "written by themselves; leave it out"
            )
    ties = {TIES: json.dumps(plan.ties)} if plan.ties and not plan.is_sharded else {}
    return {"format": "pt", **ties, **given}


def _write_files(
    plan: ExportPlan, tensors: Iterator[tuple[str, Tensor]], folder: Path, header: dict[str, str]
) -> None:
    stored = ((name, tensor) for name, tensor in tensors if name not in plan.ties)
    for file, names in plan.files.items():
        shard: dict[str, Tensor] = {}
        memory: set[int] = set()
        for expected in names:
            name, tensor = next(stored, (None, None))
            if name != expected or tensor is None:
                raise ValueError(
                    f"{'the tensors end' if name is None else f'{name!r} comes'} where the plan has {expected!r}: "
                    "give the tensors of the plan, each once, in its order"
                )
            shard[expected] = _staged(expected, tensor, plan, memory)
        _write_file(folder / f"{file}{_UNFINISHED}", shard, header)
    if (more := next(stored, None)) is not None:
        raise ValueError(f"{more[0]!r} comes after the last tensor of the plan: plan it too, or leave it out")


def _staged(name: str, tensor: Tensor, plan: ExportPlan, memory: set[int]) -> Tensor:
    """Return a tensor that the library accepts: dense, on the CPU, sharing no memory with others of the same file."""
    _check_whole(name, tensor)
    planned = plan.tensors[name]
    if (tuple(tensor.shape), tensor.dtype) != (planned.shape, planned.dtype):
        raise StateError(
            f"{name!r} is of shape {tuple(tensor.shape)} and {tensor.dtype}, planned was {planned.shape} and "
            f"{planned.dtype}; plan what is written"
        )
    staged = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    if staged.untyped_storage().data_ptr() in memory:
        staged = staged.clone()
    memory.add(staged.untyped_storage().data_ptr())
    return staged


def _check_whole(name: str, tensor: Tensor) -> None:
    """Check that a tensor is whole and has dense data of its own."""
    if hasattr(tensor, "full_tensor"):
        raise StateError(f"{name!r} is this rank's part of a tensor: gather it first, with full_tensor()")
    if tensor.is_meta:
        raise StateError(f"{name!r} is on the meta device and has no data; load or initialise it first")
    if tensor.layout != torch.strided or tensor.is_nested or hasattr(tensor, "__tensor_flatten__"):
        raise StateError(
            f"{name!r} is a {type(tensor).__name__} of {tensor.layout}; safetensors stores plain dense tensors: "
            "convert it first"
        )


def _write_file(path: Path, tensors: dict[str, Tensor], header: dict[str, str]) -> None:
    with path.open("wb") as file:
        mode = os.fstat(file.fileno()).st_mode
    save_file(tensors, path, metadata=header)
    path.chmod(mode)  # the library makes files that only their owner can read (safetensors 0.8)
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def _replace(plan: ExportPlan, folder: Path) -> None:
    """Replace an earlier export by the complete new export: rename shards, then the index, then delete leftovers."""
    if plan.is_sharded and any((folder / file).exists() for file in plan.files):
        # The old index would list a mixture of old and new shards during the renames.
        (folder / INDEX).unlink(missing_ok=True)
        sync_folder(folder)
    for file in plan.files:
        (folder / f"{file}{_UNFINISHED}").replace(folder / file)
    sync_folder(folder)
    if plan.is_sharded:
        (folder / f"{INDEX}{_UNFINISHED}").replace(folder / INDEX)
        sync_folder(folder)
    # Delete the earlier export's entry file before its shards: readers would still open it.
    (folder / (SINGLE_FILE if plan.is_sharded else INDEX)).unlink(missing_ok=True)
    sync_folder(folder)
    for path in folder.iterdir():
        if SHARD_FILE.fullmatch(path.name) and path.name not in plan.files:
            path.unlink()
    _delete_unfinished(folder)
    sync_folder(folder)


def _delete_unfinished(folder: Path) -> None:
    for path in folder.iterdir():
        name = path.name.removesuffix(_UNFINISHED)
        is_ours = name in (SINGLE_FILE, INDEX) or SHARD_FILE.fullmatch(name)
        if name != path.name and is_ours and path.is_file():
            path.unlink()
