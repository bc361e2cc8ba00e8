"""Load the newest valid checkpoint, or a named checkpoint: the same on all ranks, with every byte verified."""

import errno
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from drivetrain_checkpoint.errors import CorruptCheckpointError, FolderNotSharedError, NoCheckpointError
from drivetrain_checkpoint.format.layout import (
    STATE_PART,
    has_manifest,
    model_part,
    own_files,
    path_in_state,
    rank_part,
    step_folders,
)
from drivetrain_checkpoint.format.manifest import Manifest, check_files, read_manifest
from drivetrain_checkpoint.format.shards import Leaf
from drivetrain_checkpoint.format.state_tree import StateTree
from drivetrain_checkpoint.loading.discovery import find_checkpoints
from drivetrain_checkpoint.loading.part_reader import read_parts
from drivetrain_checkpoint.storage.place import Place, storage_of
from drivetrain_state import Context
from drivetrain_state.collectives.collective_errors import on_all_ranks, on_main

logger = logging.getLogger(__name__)

# Maps a tensor's name in the checkpoint to a leaf with the sharding to load it in; None for the whole tensor.
Like: TypeAlias = Callable[[str], Leaf | None]


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """The options of a load."""

    like: Like
    allow_pickle: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    """The content of a checkpoint, on the CPU, not yet applied to any object.

    Tensors are whole, or sharded as `like` requested: as a DTensor for a DTensor, as a `HeldRange` for a
    `FlatShard`.

    Attributes:
        path: The checkpoint's folder.
        step: The optimizer step at which the checkpoint was saved.
        models: The state of each model by name; tied tensors are one tensor again.
        replicated: The states that are the same on all ranks, by name.
        per_rank: The states of this rank alone, by name; None if the world size changed.
        per_rank_missing: The reason why `per_rank` is None; None if `per_rank` was loaded.
        saved_world_size: The number of ranks that saved.
        plan: The effective plan of the run that saved; None if none was given.
    """

    path: Place
    step: int
    models: Mapping[str, Mapping[str, StateTree]]
    replicated: Mapping[str, StateTree]
    per_rank: Mapping[str, StateTree] | None
    per_rank_missing: str | None
    saved_world_size: int
    plan: Mapping[str, Any] | None


def load_newest(context: Context, directory: Place, how: LoadOptions) -> LoadResult:
    """Load the newest checkpoint that is valid on every rank; skip damaged ones with a warning on rank 0.

    Called on all ranks.

    Raises:
        NoCheckpointError: No checkpoint is valid; the message names the fault of each checkpoint.
    """
    problems: list[str] = []
    for folder in _find_valid(context, directory, problems):
        answer = _try(context, folder, how)
        if isinstance(answer, LoadResult):
            return answer
        problems.append(str(answer))
        if context.topology.is_main:
            logger.warning("%s is passed over: %s", folder, answer)
    why = "it holds none" if not problems else f"none of those in it is good: {'; '.join(problems)}"
    raise NoCheckpointError(f"no checkpoint to load in {directory}: {why}")


def load_from(context: Context, folder: Place, how: LoadOptions) -> LoadResult:
    """Load the checkpoint in a folder. Called on all ranks.

    Raises:
        NoCheckpointError: The folder does not exist, or holds no file of a checkpoint.
        CorruptCheckpointError: The checkpoint is damaged, as seen by any rank; the message names the file.
    """
    doing = f"the load of {folder}"
    if not all(on_all_ranks(context, lambda: storage_of(folder).is_folder(folder), doing=doing)):
        raise NoCheckpointError(
            f"{folder} is no folder on every rank: name a checkpoint's, such as .../step-100"
        )
    answer = _try(context, folder, how)
    if isinstance(answer, CorruptCheckpointError):
        if why := on_main(context, lambda: _explain_none(folder), doing=doing):
            raise NoCheckpointError(why)
        raise answer
    return answer


def _explain_none(folder: Place) -> str | None:
    """Return why a folder is no checkpoint; None if it may be a checkpoint or the remains of a checkpoint."""
    if has_manifest(folder) or own_files(folder):
        return None
    if step_folders(folder / "checkpoints"):
        return f"{folder} is no checkpoint, but {folder / 'checkpoints'} holds some: load from there"
    if any(name.endswith(".safetensors") for name in storage_of(folder).sizes_in(folder)):
        return f"{folder} is no checkpoint; it holds a model alone, which load_model() loads"
    return f"{folder} is no checkpoint: name a checkpoint, such as .../step-100, or a folder of checkpoints"


def holds_checkpoints(context: Context, folder: Place) -> bool:
    """Return whether rank 0 sees checkpoints in a folder that is not a checkpoint itself. Called on all ranks."""

    def look() -> bool:
        return not has_manifest(folder) and bool(step_folders(folder))

    return on_main(context, look, doing=f"the load of {folder}")


def newest(context: Context, directory: Place) -> Place | None:
    """Return the folder of the newest checkpoint with a valid manifest and file sizes, or None.

    Called on all ranks.
    """
    return next(iter(_find_valid(context, directory, [])), None)


def newest_plan(context: Context, directory: Place) -> Mapping[str, Any] | None:
    """Return the plan in the checkpoint that `newest` returns; None without a plan. Called on all ranks."""
    folder = newest(context, directory)
    if folder is None:
        return None
    return on_main(context, lambda: read_manifest(folder).plan, doing=f"the plan of {folder}")


def _find_valid(context: Context, directory: Place, problems: list[str]) -> list[Place]:
    """Return the valid checkpoints that rank 0 sees, newest first; add the faults of invalid ones to `problems`."""

    # Exchanges names rather than places: a place may hold credentials of its host.
    def look() -> tuple[list[str], list[str]]:
        found = find_checkpoints(directory)
        for one in found:
            if one.problem is not None and one.committed:
                logger.warning("%s is passed over: %s", one.folder, one.problem)
        return (
            [one.folder.name for one in found if one.is_valid],
            [one.problem for one in found if one.problem],
        )

    names, told = on_main(context, look, doing=f"the search of {directory}")
    problems.extend(told)
    return [directory / name for name in names]


def _try(context: Context, folder: Place, how: LoadOptions) -> LoadResult | CorruptCheckpointError:
    """Read the states of this rank. If a rank fails, return this rank's error, or else the first failed rank's."""
    loaded: LoadResult | None = None
    damage: CorruptCheckpointError | None = None

    def read() -> tuple[str | None, str | None]:
        nonlocal loaded, damage
        try:
            manifest = read_manifest(folder)
            check_files(folder, manifest)
            loaded = _read(context, folder, manifest, how)
        except CorruptCheckpointError as error:
            damage = error
            return None, str(error)
        except OSError as error:
            if error.errno != errno.EIO:  # a failing disk counts as damage, other errors do not
                raise
            damage = CorruptCheckpointError(f"{folder} cannot be read: {error}; load another checkpoint")
            return None, str(damage)
        return manifest.save_id, None

    answers = on_all_ranks(context, read, doing=f"the load of {folder}")
    told = next((told for _, told in answers if told is not None), None)
    if told is not None:
        return damage or CorruptCheckpointError(told)
    if len({save_id for save_id, _ in answers}) > 1:
        raise FolderNotSharedError(
            f"the ranks see different checkpoints in {folder}: load from a folder that every host mounts"
        )
    assert loaded is not None
    return loaded


def _read(context: Context, folder: Place, manifest: Manifest, how: LoadOptions) -> LoadResult:
    topology = context.topology
    parts = [*map(model_part, manifest.models), STATE_PART]
    same_ranks = manifest.world_size == topology.world_size
    if same_ranks:
        parts.append(rank_part(topology.rank))
    states = read_parts(
        folder,
        manifest,
        parts,
        like=lambda part, name: how.like(path) if (path := path_in_state(part, name)) else None,
        allow_pickle=how.allow_pickle,
        on_block=lambda: context.progress.mark(f"read {folder.name}"),
    )
    return LoadResult(
        path=folder,
        step=manifest.step,
        models={name: states[model_part(name)] for name in manifest.models},
        replicated=states[STATE_PART],
        per_rank=states[rank_part(topology.rank)] if same_ranks else None,
        per_rank_missing=None
        if same_ranks
        else f"{manifest.world_size} ranks saved and {topology.world_size} load: per-rank states can only be loaded "
        "by as many ranks as saved them",
        saved_world_size=manifest.world_size,
        plan=manifest.plan,
    )
