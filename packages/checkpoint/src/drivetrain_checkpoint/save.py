"""A save as a transaction: every rank writes its files, then rank 0 commits them all with the manifest."""

import platform
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any
from uuid import uuid4

from drivetrain_checkpoint.agreement import on_all_ranks
from drivetrain_checkpoint.errors import FolderNotSharedError
from drivetrain_checkpoint.files import FileRecord
from drivetrain_checkpoint.layout import MANIFEST, next_attempt, own_files, plan_parts, step_folder
from drivetrain_checkpoint.manifest import Manifest, commit_manifest, encode_plan
from drivetrain_checkpoint.parts import write_part
from drivetrain_checkpoint.retention import delete, plan_retention
from drivetrain_checkpoint.survey import find_checkpoints, inspect
from drivetrain_checkpoint.tree import State
from drivetrain_state import Context


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """What is saved. `models` and `replicated` are rank 0's; other ranks' are not looked at.

    Attributes:
        models: Each model's state by its name.
        replicated: States that are the same on all ranks, by name.
        per_rank: States that each rank has of its own, by name.
        plan: The effective plan of the run: plain values.
    """

    models: Mapping[str, Mapping[str, State]]
    replicated: Mapping[str, State]
    per_rank: Mapping[str, State]
    plan: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _SavePlan:
    """What rank 0 decides for all: where the files go, and what the manifest will say but for them."""

    folder: Path
    manifest: Manifest


def save(context: Context, directory: Path, step: int, content: Content, *, keep_last: int | None) -> Path:
    """Write a checkpoint, commit it, then delete what need not stay. Called on all ranks.

    Returns:
        The checkpoint's folder.

    Raises:
        StateError: Something in `content` cannot be stored; nothing was saved.
        RankFailedError: Another rank failed; nothing was saved.
        FolderNotSharedError: This rank does not see the folder that rank 0 made.
    """
    is_main = context.topology.is_main
    plan = _agreed_plan(context, directory, step, content)
    try:
        written = on_all_ranks(
            context, lambda: _write(context, plan, content), doing=f"the save of step {step}"
        )
        files = {record.name: record for records in written for record in records}
        manifest = replace(
            plan.manifest, files=files, saved_at=datetime.now(UTC).isoformat(timespec="seconds")
        )
        on_all_ranks(
            context,
            lambda: commit_manifest(plan.folder, manifest) if is_main else None,
            doing=f"the commit of step {step}",
        )
    except BaseException:
        if is_main:
            _discard(plan)
        raise
    if is_main:
        _clean_up(directory, plan.folder, files, keep_last)
    return plan.folder


def _agreed_plan(context: Context, directory: Path, step: int, content: Content) -> _SavePlan:
    """Rank 0's plan, once all ranks are here and mean the same folder."""

    def prepare() -> tuple[Path, _SavePlan | None]:
        if type(step) is not int or step < 0:
            raise ValueError(f"step={step!r}: an integer from 0 on is allowed")
        plan = _prepare(context, directory, step, content) if context.topology.is_main else None
        return step_folder(directory, step), plan

    answers = on_all_ranks(context, prepare, doing=f"the save of step {step}")
    if len({folder for folder, _ in answers}) > 1:
        shown = ", ".join(f"rank {rank}: {folder}" for rank, (folder, _) in enumerate(answers))
        raise ValueError(
            f"save() would write different folders ({shown}); save the same step into the same directory on all ranks"
        )
    plan = answers[0][1]
    assert plan is not None
    return plan


def _prepare(context: Context, directory: Path, step: int, content: Content) -> _SavePlan:
    """Make the folder. Files of a committed checkpoint of this step stay until the new ones are committed."""
    encode_plan(content.plan)  # a plan that cannot be written is known before anything is
    folder = step_folder(directory, step)
    if not (folder / MANIFEST).is_file():
        for path in own_files(folder):
            path.unlink()
    parts = plan_parts(content.models, world_size=context.topology.world_size, attempt=next_attempt(folder))
    folder.mkdir(parents=True, exist_ok=True)
    manifest = Manifest(
        step=step,
        sequence=1 + max((one.sequence for one in find_checkpoints(directory)), default=0),
        save_id=uuid4().hex,
        saved_at="",
        world_size=context.topology.world_size,
        parts=parts,
        files={},
        libraries={"python": platform.python_version()}
        | {name: version(name) for name in ("torch", "safetensors", "drivetrain-checkpoint")},
        plan=content.plan,
    )
    return _SavePlan(folder=folder, manifest=manifest)


def _write(context: Context, plan: _SavePlan, content: Content) -> list[FileRecord]:
    """This rank's files."""
    folder, parts, rank = plan.folder, plan.manifest.parts, context.topology.rank
    if not _is_visible(folder):
        raise FolderNotSharedError(
            f"rank {rank} does not see {folder}, which rank 0 made: save into a folder that every host mounts"
        )

    def on_block() -> None:
        context.watch.mark(f"write {folder.name}")

    records: list[FileRecord] = []
    if context.topology.is_main:
        for name, state in content.models.items():
            records += write_part(
                folder, parts.models[name], dict(state), root=f"models[{name!r}]", on_block=on_block
            )
        records += write_part(
            folder, parts.replicated, dict(content.replicated), root="replicated", on_block=on_block
        )
    records += write_part(
        folder, parts.per_rank[rank], dict(content.per_rank), root="per_rank", on_block=on_block
    )
    return records


def _is_visible(folder: Path) -> bool:
    """Whether the folder is there, asked of its parent: a network file system may remember that it was not."""
    return folder.parent.is_dir() and folder in folder.parent.iterdir()


def _discard(plan: _SavePlan) -> None:
    """Delete the files of a save that was given up, unless it was committed after all."""
    committed = inspect(plan.folder).manifest
    if committed is not None and committed.save_id == plan.manifest.save_id:
        return
    _delete_unlisted(plan.folder, keep=committed.files if committed is not None else {})
    if committed is None:
        delete([plan.folder])


def _clean_up(directory: Path, folder: Path, files: Mapping[str, FileRecord], keep_last: int | None) -> None:
    """After a commit: what it replaced in its folder, then what retention lets go."""
    _delete_unlisted(folder, keep=files)
    delete(plan_retention(find_checkpoints(directory), keep_last=keep_last))


def _delete_unlisted(folder: Path, *, keep: Mapping[str, FileRecord]) -> None:
    for path in own_files(folder):
        if path.name not in keep:
            path.unlink()
