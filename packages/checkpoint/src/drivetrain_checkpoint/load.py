"""A load: the newest valid checkpoint, or the one that is named, on all ranks the same, every byte checked."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drivetrain_checkpoint.agreement import on_all_ranks
from drivetrain_checkpoint.errors import CorruptCheckpointError, FolderNotSharedError, NoCheckpointError
from drivetrain_checkpoint.layout import MANIFEST, step_folders
from drivetrain_checkpoint.manifest import Manifest, check_files, read_manifest
from drivetrain_checkpoint.parts import read_part
from drivetrain_checkpoint.survey import find_checkpoints
from drivetrain_checkpoint.tree import State
from drivetrain_state import Context, broadcast_object, gather_object

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What a checkpoint held, on the CPU; nothing was applied to anything yet.

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

    path: Path
    step: int
    models: Mapping[str, Mapping[str, State]]
    replicated: Mapping[str, State]
    per_rank: Mapping[str, State] | None
    per_rank_missing: str | None
    saved_world_size: int
    plan: Mapping[str, Any] | None


def load_newest(context: Context, directory: Path) -> Loaded:
    """The newest checkpoint that is good on every rank; damaged ones are passed over, with a warning on rank 0.

    Called on all ranks.

    Raises:
        NoCheckpointError: There is none; the message says what is wrong with those that are there.
    """
    problems: list[str] = []
    for folder in _candidates(context, directory, problems):
        answer = _try(context, folder)
        if isinstance(answer, Loaded):
            return answer
        problems.append(str(answer))
        if context.topology.is_main:
            logger.warning("%s is passed over: %s", folder, answer)
    why = "it holds none" if not problems else f"none of those in it is good: {'; '.join(problems)}"
    raise NoCheckpointError(f"no checkpoint to load in {directory}: {why}")


def load_from(context: Context, folder: Path) -> Loaded:
    """The checkpoint of a folder. Called on all ranks.

    Raises:
        NoCheckpointError: There is no such folder.
        CorruptCheckpointError: It is damaged, for this rank or another; the message names the file.
    """
    if not all(gather_object(context, folder.is_dir())):
        raise NoCheckpointError(
            f"{folder} is no folder on every rank: name a checkpoint's, such as .../step-100"
        )
    answer = _try(context, folder)
    if isinstance(answer, CorruptCheckpointError):
        raise answer
    return answer


def holds_checkpoints(context: Context, folder: Path) -> bool:
    """Whether a folder is no checkpoint itself but holds some, as rank 0 sees it. Called on all ranks."""
    found = context.topology.is_main and not (folder / MANIFEST).exists() and bool(step_folders(folder))
    return broadcast_object(context, found)


def newest(context: Context, directory: Path) -> Path | None:
    """The folder of the newest checkpoint by manifest and file sizes; None if there is none. Called on all ranks."""
    return next(iter(_candidates(context, directory, [])), None)


def _candidates(context: Context, directory: Path, problems: list[str]) -> list[Path]:
    """What rank 0 sees: the folders that may be loaded, newest first; what is wrong with the others is noted."""
    found = find_checkpoints(directory) if context.topology.is_main else ()
    for one in found:
        if one.problem is not None and one.committed:
            logger.warning("%s is passed over: %s", one.folder, one.problem)
    folders, told = broadcast_object(
        context,
        ([one.folder for one in found if one.is_valid], [one.problem for one in found if one.problem]),
    )
    problems.extend(told)
    return folders


def _try(context: Context, folder: Path) -> Loaded | CorruptCheckpointError:
    """What this rank reads, if every rank could read its own; else the first rank's error."""
    loaded: Loaded | None = None
    damage: CorruptCheckpointError | None = None

    def read() -> tuple[str | None, str | None]:
        nonlocal loaded, damage
        try:
            manifest = read_manifest(folder)
            check_files(folder, manifest)
            loaded = _read(context, folder, manifest)
        except CorruptCheckpointError as error:
            damage = error
            return None, str(error)
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


def _read(context: Context, folder: Path, manifest: Manifest) -> Loaded:
    topology, parts = context.topology, manifest.parts

    def on_block() -> None:
        context.watch.mark(f"read {folder.name}")

    def read(stem: str) -> State:
        return read_part(folder, stem, manifest.files, on_block=on_block)

    same_ranks = manifest.world_size == topology.world_size
    return Loaded(
        path=folder,
        step=manifest.step,
        models={name: read(stem) for name, stem in parts.models.items()},
        replicated=read(parts.replicated),
        per_rank=read(parts.per_rank[topology.rank]) if same_ranks else None,
        per_rank_missing=None if same_ranks else _why_missing(manifest.world_size, topology.world_size),
        saved_world_size=manifest.world_size,
        plan=manifest.plan,
    )


def _why_missing(saved: int, now: int) -> str:
    return f"{saved} ranks saved and {now} load: what each rank had of its own fits no other number of them"
