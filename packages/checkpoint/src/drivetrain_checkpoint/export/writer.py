"""Models as other programs read them: safetensors in one file, or in several with an index, as Hugging Face has it.

```text
model.safetensors                                    all tensors, where they fit into one file
model-00001-of-00002.safetensors, model-00002-of-... the tensors in several files
model.safetensors.index.json                         which file holds which tensor
```

A tensor with several names is stored under the first; the key "tied_weights" says which names are meant by it (in
the one file's header, as JSON; of several files, in the index's `metadata`). Readers that do not know it tie by
themselves.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from drivetrain_checkpoint.errors import StateError
from drivetrain_checkpoint.export.plan import (
    INDEX,
    SHARD_FILE,
    SINGLE_FILE,
    ExportPlan,
    plan_export,
    tied_names,
)
from drivetrain_checkpoint.storage.base import on_disk
from drivetrain_checkpoint.storage.local import sync_folder

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
    """Write a model as `from_pretrained` and other readers of safetensors expect it.

    For tensors that come one at a time, see `plan_export` and `write_export`.

    Args:
        model: A module, or whole tensors by name. Names of the same memory are stored once; views that overlap
            and differ are stored in full each.
        folder: Where; it is made where it is missing. An export in it is replaced, see `write_export`.
        max_shard_size: What one file's tensors may take together, in bytes or as "5GB", "512MiB".
        metadata: Written into the header of every file, beside `{"format": "pt"}`.

    Returns:
        What was written.

    Raises:
        StateError: Something cannot be stored; nothing was written.
        ValueError: No such size, or `metadata` has a key that is taken.
    """
    tensors: Mapping[str, Tensor] = model.state_dict() if isinstance(model, nn.Module) else model
    for name, tensor in tensors.items():
        if isinstance(tensor, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance] the plan refuses others
            _check_whole(name, tensor)
    known = {name: tensor for name, tensor in tensors.items() if hasattr(tensor, "layout")}
    plan = plan_export(tensors, max_shard_size=max_shard_size, ties=tied_names(known))
    write_export(plan, tensors.items(), folder, metadata=metadata)
    return plan


def write_export(
    plan: ExportPlan,
    tensors: Iterable[tuple[str, Tensor]],
    folder: Path | str,
    *,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write planned tensors as they come, holding those of one file at a time.

    Everything is written under other names and forced to the disk before it replaces an earlier export in the folder:
    until then, an error or a kill leaves that export as it was. The renames take the shortest time. Killed in that
    time, the folder holds the earlier export or the new one; or, where both have the same file names, none that could
    be read, never a mixture. Saving again mends it, and deletes what was left over.

    Args:
        plan: Of `plan_export`.
        tensors: Names with whole tensors of any device and strides, in the plan's order. A name that the plan has as
            a tie may come too, and is passed over.
        folder: Where; it is made where it is missing.
        metadata: Written into the header of every file, beside `{"format": "pt"}`.

    Raises:
        StateError: A tensor is not what was planned, or cannot be stored.
        ValueError: The names are not the plan's, or `metadata` has a key that is taken.
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
            _write_index(plan, folder)
        sync_folder(folder)
    except BaseException:
        _delete_unfinished(folder)
        raise
    _replace(plan, folder)


def write_tensor_file(
    path: Path | str, tensors: Mapping[str, Tensor], *, metadata: Mapping[str, str] | None = None
) -> None:
    """Write one safetensors file of any name; an earlier one is replaced once the new one is on the disk.

    Args:
        path: The file, in a folder that is there.
        tensors: Whole tensors by name, on any device.
        metadata: Written into its header, beside `{"format": "pt"}`.

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
    """What every file's header says beside its tensors."""
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
            shard[expected] = _staged(expected, _take(stored, expected), plan, memory)
        _write_file(folder / f"{file}{_UNFINISHED}", shard, header)
    if (more := next(stored, None)) is not None:
        raise ValueError(f"{more[0]!r} comes after the last tensor of the plan: plan it too, or leave it out")


def _take(stored: Iterator[tuple[str, Tensor]], expected: str) -> Tensor:
    """The next tensor, which must be of this name."""
    name, tensor = next(stored, (None, None))
    if name != expected or tensor is None:
        raise ValueError(
            f"{'the tensors end' if name is None else f'{name!r} comes'} where the plan has {expected!r}: give the "
            "tensors of the plan, each once, in its order"
        )
    return tensor


def _staged(name: str, tensor: Tensor, plan: ExportPlan, memory: set[int]) -> Tensor:
    """A tensor as the library takes it: dense, on the CPU, in memory that no other one of its file is in."""
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
    """Refuse tensors without dense data of their own.

    Raises:
        StateError: It is one.
    """
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
    path.chmod(mode)  # the library's files are their owner's alone (safetensors 0.8)
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def _write_index(plan: ExportPlan, folder: Path) -> None:
    about: dict[str, object] = {"total_size": plan.total_size}
    if plan.ties:
        about[TIES] = dict(plan.ties)
    with (folder / f"{INDEX}{_UNFINISHED}").open("w", encoding="utf-8") as file:
        json.dump({"metadata": about, "weight_map": plan.weight_map}, file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


def _replace(plan: ExportPlan, folder: Path) -> None:
    """Put a complete new export in the place of an earlier one: shards, then the index, then what is left goes."""
    if plan.is_sharded and any((folder / file).exists() for file in plan.files):
        # Its index would list a mixture while they are renamed one by one.
        (folder / INDEX).unlink(missing_ok=True)
        sync_folder(folder)
    for file in plan.files:
        (folder / f"{file}{_UNFINISHED}").replace(folder / file)
    sync_folder(folder)
    if plan.is_sharded:
        (folder / f"{INDEX}{_UNFINISHED}").replace(folder / INDEX)
        sync_folder(folder)
    # What readers would still take for the export goes before the shards of an earlier one.
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
