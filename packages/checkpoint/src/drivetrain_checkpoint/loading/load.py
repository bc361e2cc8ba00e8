"""A load: the newest valid checkpoint, or the one that is named, on all ranks the same, every byte checked."""

import errno
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from drivetrain_checkpoint.coordination.collective_errors import on_all_ranks, on_main
from drivetrain_checkpoint.errors import CorruptCheckpointError, FolderNotSharedError, NoCheckpointError
from drivetrain_checkpoint.format.layout import (
    MANIFEST,
    STATE_PART,
    model_part,
    own_files,
    rank_part,
    step_folders,
)
from drivetrain_checkpoint.format.manifest import Manifest, check_files, read_manifest
from drivetrain_checkpoint.format.shards import Leaf
from drivetrain_checkpoint.format.state_tree import State
from drivetrain_checkpoint.loading.discovery import find_checkpoints
from drivetrain_checkpoint.loading.reader import read_parts
from drivetrain_checkpoint.storage import base as storage
from drivetrain_checkpoint.storage.base import Place
from drivetrain_state import Context

logger = logging.getLogger(__name__)

# Of a tensor's name in the checkpoint: what it is to be divided like here; None for the whole tensor.
Like: TypeAlias = Callable[[str], Leaf | None]


@dataclass(frozen=True, slots=True)
class Reading:
    """How a checkpoint is read.

    Attributes:
        like: How tensors are divided here.
        allow_pickle: Whether pickles in it are loaded, which runs code.
    """

    like: Like
    allow_pickle: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What a checkpoint held, on the CPU; nothing was applied to anything yet.

    Tensors are whole, or divided as the load was told: DTensors as DTensors, others as `FlatPart`.

    Attributes:
        path: The checkpoint's folder.
        step: The optimizer step it was saved at.
        models: Each model's state by its name; tied tensors are one tensor again.
        replicated: States that are the same on all ranks, by name.
        per_rank: This rank's own states, by name; None if the world size changed.
        per_rank_missing: Why `per_rank` is None; None if it is not.
        saved_world_size: The number of ranks that saved.
        plan: The effective plan of the run that saved, if it gave one.
    """

    path: Place
    step: int
    models: Mapping[str, Mapping[str, State]]
    replicated: Mapping[str, State]
    per_rank: Mapping[str, State] | None
    per_rank_missing: str | None
    saved_world_size: int
    plan: Mapping[str, Any] | None


def load_newest(context: Context, directory: Place, how: Reading) -> Loaded:
    """The newest checkpoint that is good on every rank; damaged ones are passed over, with a warning on rank 0.

    Called on all ranks.

    Raises:
        NoCheckpointError: There is none; the message says what is wrong with those that are there.
    """
    problems: list[str] = []
    for folder in _candidates(context, directory, problems):
        answer = _try(context, folder, how)
        if isinstance(answer, Loaded):
            return answer
        problems.append(str(answer))
        if context.topology.is_main:
            logger.warning("%s is passed over: %s", folder, answer)
    why = "it holds none" if not problems else f"none of those in it is good: {'; '.join(problems)}"
    raise NoCheckpointError(f"no checkpoint to load in {directory}: {why}")


def load_from(context: Context, folder: Place, how: Reading) -> Loaded:
    """The checkpoint of a folder. Called on all ranks.

    Raises:
        NoCheckpointError: There is no such folder, or nothing of a checkpoint in it.
        CorruptCheckpointError: It is damaged, for this rank or another; the message names the file.
    """
    doing = f"the load of {folder}"
    if not all(on_all_ranks(context, lambda: storage.is_folder(folder), doing=doing)):
        raise NoCheckpointError(
            f"{folder} is no folder on every rank: name a checkpoint's, such as .../step-100"
        )
    answer = _try(context, folder, how)
    if isinstance(answer, CorruptCheckpointError):
        if why := on_main(context, lambda: _why_none(folder), doing=doing):
            raise NoCheckpointError(why)
        raise answer
    return answer


def _why_none(folder: Place) -> str | None:
    """Why a folder is no checkpoint at all, nor what is left of one; None if it may be."""
    if storage.is_file(folder / MANIFEST) or own_files(folder):
        return None
    if step_folders(folder / "checkpoints"):
        return f"{folder} is no checkpoint, but {folder / 'checkpoints'} holds some: load from there"
    if any(name.endswith(".safetensors") for name in storage.sizes_in(folder)):
        return f"{folder} is no checkpoint; it holds a model alone, which load_model() loads"
    return f"{folder} is no checkpoint: name the folder of one, such as .../step-100, or one that holds some"


def holds_checkpoints(context: Context, folder: Place) -> bool:
    """Whether a folder is no checkpoint itself but holds some, as rank 0 sees it. Called on all ranks."""

    def look() -> bool:
        return not storage.is_file(folder / MANIFEST) and bool(step_folders(folder))

    return on_main(context, look, doing=f"the load of {folder}")


def newest(context: Context, directory: Place) -> Place | None:
    """The folder of the newest checkpoint by manifest and file sizes; None if there is none. Called on all ranks."""
    return next(iter(_candidates(context, directory, [])), None)


def _candidates(context: Context, directory: Place, problems: list[str]) -> list[Place]:
    """What rank 0 sees: the folders that may be loaded, newest first; what is wrong with the others is noted."""

    def look() -> tuple[list[str], list[str]]:  # names: a place on another host may have its own credentials
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


def _try(context: Context, folder: Place, how: Reading) -> Loaded | CorruptCheckpointError:
    """What this rank reads, if every rank could read its own; else the first rank's error."""
    loaded: Loaded | None = None
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
            if error.errno != errno.EIO:
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


def _read(context: Context, folder: Place, manifest: Manifest, how: Reading) -> Loaded:
    topology = context.topology
    parts = [*map(model_part, manifest.models), STATE_PART]
    prefixes = {STATE_PART: "replicated", **{model_part(name): f"models/{name}" for name in manifest.models}}
    same_ranks = manifest.world_size == topology.world_size
    if same_ranks:
        parts.append(rank_part(topology.rank))
    states = read_parts(
        folder,
        manifest,
        parts,
        like=lambda part, name: how.like(f"{prefixes[part]}/{name}") if part in prefixes else None,
        allow_pickle=how.allow_pickle,
        on_block=lambda: context.watch.mark(f"read {folder.name}"),
    )
    return Loaded(
        path=folder,
        step=manifest.step,
        models={name: states[model_part(name)] for name in manifest.models},
        replicated=states[STATE_PART],
        per_rank=states[rank_part(topology.rank)] if same_ranks else None,
        per_rank_missing=None if same_ranks else _why_missing(manifest.world_size, topology.world_size),
        saved_world_size=manifest.world_size,
        plan=manifest.plan,
    )


def _why_missing(saved: int, now: int) -> str:
    return f"{saved} ranks saved and {now} load: what each rank had of its own fits no other number of them"
