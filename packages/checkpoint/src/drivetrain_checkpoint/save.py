"""A save as a transaction: what ranks write is agreed, written by all, and committed by rank 0 with the manifest."""

import json
import logging
import platform
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any
from uuid import uuid4

from torch import Tensor

from drivetrain_checkpoint import storage
from drivetrain_checkpoint.agreement import Outcome, on_all_ranks
from drivetrain_checkpoint.catalogue import PlannedFile, files_of, tensors_of
from drivetrain_checkpoint.content import Content, Holdings, OwnContent, own_content
from drivetrain_checkpoint.errors import FolderNotSharedError, StateError
from drivetrain_checkpoint.files import FileRecord, HashedWriter
from drivetrain_checkpoint.layout import (
    MANIFEST,
    STATE_PART,
    model_part,
    next_attempt,
    own_files,
    rank_part,
    step_folder,
    step_folders,
    tree_file,
)
from drivetrain_checkpoint.lease import check_shared, lease_of
from drivetrain_checkpoint.manifest import Manifest, commit_manifest, encode_plan
from drivetrain_checkpoint.retention import Keep, delete, plan_retention
from drivetrain_checkpoint.staging import HostBuffer, on_host
from drivetrain_checkpoint.storage import Place
from drivetrain_checkpoint.survey import find_checkpoints, inspect
from drivetrain_checkpoint.tensor_file import bytes_of
from drivetrain_checkpoint.tree import Json
from drivetrain_checkpoint.write_plan import WritePlan, plan_writes
from drivetrain_state import Context, gather_object

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """A save that all ranks have agreed on, with this rank's values: ready to be written.

    Attributes:
        directory: The folder of the checkpoints.
        folder: The checkpoint's.
        manifest: What it will say, but for the files and the time.
        files: The tensor files that this rank writes, with their tensors.
        trees: The other files that this rank writes.
        is_main: Whether this rank commits.
    """

    directory: Place
    folder: Place
    manifest: Manifest
    files: tuple[tuple[PlannedFile, tuple[Tensor, ...]], ...]
    trees: Mapping[str, Json]
    is_main: bool

    @property
    def step(self) -> int:
        """The optimizer step."""
        return self.manifest.step

    def staged(self, buffer: HostBuffer) -> "Save":
        """The same with copies of the tensors, which training does not change."""
        staged = iter(buffer.stage([tensor for _, tensors in self.files for tensor in tensors]))
        return replace(
            self, files=tuple((file, tuple(next(staged) for _ in tensors)) for file, tensors in self.files)
        )

    def write(self, on_block: Callable[[], None]) -> list[FileRecord]:
        """Write this rank's files; they are on the disk when this returns."""
        records: list[FileRecord] = []
        for file, tensors in self.files:
            with HashedWriter(self.folder / file.name, on_block=on_block) as writer:
                writer.write(file.layout.header)
                for index in file.layout.order:
                    staged = on_host(tensors[index])
                    writer.write(bytes_of(staged))
                records.append(writer.record())
        for name, tree in self.trees.items():
            with HashedWriter(self.folder / name, on_block=on_block) as writer:
                writer.write(json.dumps(tree, allow_nan=False, indent=1).encode())
                records.append(writer.record())
        return records

    def commit(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Make it a checkpoint of the files that all ranks have written. Called on rank 0."""
        files = {record["name"]: FileRecord.from_json(record) for record in records}
        sizes = storage.sizes_in(self.folder)
        if lost := sorted(name for name, record in files.items() if sizes.get(name) != record.size_bytes):
            raise FolderNotSharedError(
                f"rank 0 does not see in {self.folder} what was written there, {lost[0]} for one: save into a folder "
                "that every host mounts, or a store that every process reaches"
            )
        saved_at = datetime.now(UTC).isoformat(timespec="seconds")
        commit_manifest(self.folder, replace(self.manifest, files=files, saved_at=saved_at))

    def discard(self) -> None:
        """Delete its files, unless it was committed after all. Called on rank 0."""
        with _warned_of(f"{self.folder}: leftovers of a save that was given up stay"):
            committed = inspect(self.folder).manifest
            if committed is not None and committed.save_id == self.manifest.save_id:
                return
            _delete_unlisted(self.folder, keep=committed.files if committed is not None else {})
            if committed is None:
                delete([self.folder])

    def clean_up(self, keep: Keep) -> None:
        """Delete what it replaced in its folder, then what retention lets go. Called on rank 0 after the commit."""
        with _warned_of(f"{self.directory}: old checkpoints stay"):
            committed = inspect(self.folder).manifest
            if committed is not None:
                _delete_unlisted(self.folder, keep=committed.files)
            if keep.last is not None:
                delete(plan_retention(find_checkpoints(self.directory), keep))


class Saver:
    """Agrees with the other ranks on saves into a directory; keeps what serves the next one.

    Args:
        context: This process among the others.
        directory: The folder of the checkpoints.
    """

    def __init__(self, context: Context, directory: Place) -> None:
        self._context = context
        self._directory = directory
        self._digests: list[str] = []
        self._plan: WritePlan | None = None
        self._sequences: dict[str, int] = {}  # by folder
        self._lease = lease_of(directory)

    def prepare(self, step: int, content: Content) -> Save:
        """Agree on a save. Called on all ranks, by the main thread; nothing is written but for an empty folder.

        Raises:
            StateError: Something in `content` cannot be stored; nothing was saved.
            OtherRankFailedError: Another rank failed; nothing was saved.
            FolderNotSharedError: This rank does not see the folder that rank 0 made.
            FolderInUseError: Another run writes into the directory.
            ValueError: The ranks mean different folders.
        """
        context, topology = self._context, self._context.topology
        doing = f"the save of step {step}"
        contents: list[OwnContent] = []

        def encode() -> str:
            if type(step) is not int or step < 0:
                raise ValueError(f"step={step!r}: an integer from 0 on is allowed")
            encode_plan(content.plan)  # what cannot be written is known before anything is
            _check_metrics(content.metrics, content.best_metric)
            contents.append(own_content(content, topology.rank))
            return str(step_folder(self._directory, step))

        folders = on_all_ranks(context, encode, doing=doing)
        if len(set(folders)) > 1:
            shown = ", ".join(f"rank {rank}: {folder}" for rank, folder in enumerate(folders))
            raise ValueError(
                f"save() would write different folders ({shown}); save the same step into the same directory on all "
                "ranks"
            )
        [own] = contents
        plan = self._plan_for(own.holdings)
        started = on_all_ranks(
            context, lambda: self._start(step, content, plan) if topology.is_main else None, doing=doing
        )[0]
        assert started is not None
        manifest, token = started
        save = _own_save(own, plan, self._directory, manifest, topology.rank)
        try:
            on_all_ranks(context, lambda: self._check_visible(save.folder, token), doing=doing)
        except BaseException:
            if topology.is_main:
                save.discard()
            raise
        return save

    def _plan_for(self, holdings: Holdings) -> WritePlan:
        """Who writes what, planned anew where ranks hold other parts than at the last save.

        Raises:
            StateError: The ranks' parts are no whole tensors.
        """
        digests = gather_object(self._context, holdings.digest())
        if self._plan is None or digests != self._digests:
            ranks = gather_object(self._context, holdings)
            _check_names(ranks)
            tensors = {**ranks[0].shared, **{name: t for rank in ranks for name, t in rank.own.items()}}
            self._plan = plan_writes(tensors, [{**rank.shared, **rank.own} for rank in ranks])
            self._digests = digests
        return self._plan

    def _start(self, step: int, content: Content, plan: WritePlan) -> tuple[Manifest, str | None]:
        """Make the folder. Files of a committed checkpoint of this step stay until the new ones are committed.

        Raises:
            FolderInUseError: Another run writes into the directory.
        """
        token = self._lease.take() if self._lease is not None else None
        folder = step_folder(self._directory, step)
        if not storage.is_file(folder / MANIFEST):
            storage.remove(own_files(folder))
        sequence = self._next_sequence(folder)
        attempt, world_size = next_attempt(folder), self._context.topology.world_size
        storage.make_folder(folder)
        parts = [*map(model_part, content.models), STATE_PART, *map(rank_part, range(world_size))]
        files = [file for rank in range(world_size) for file in files_of(plan, rank, attempt)]
        mesh = self._context.mesh
        manifest = Manifest(
            step=step,
            sequence=sequence,
            save_id=uuid4().hex,
            saved_at="",
            world_size=world_size,
            mesh={} if mesh is None else dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False)),
            attempt=attempt,
            models=tuple(content.models),
            files={},
            tensors=tensors_of(plan, files, parts),
            libraries={"python": platform.python_version()}
            | {name: version(name) for name in ("torch", "safetensors", "drivetrain-checkpoint")},
            plan=content.plan,
            metrics=content.metrics,
        )
        return manifest, token

    def _next_sequence(self, folder: Place) -> int:
        """Above that of every checkpoint of the directory, of which each is looked at once."""
        for one in step_folders(self._directory):
            if one.name not in self._sequences:
                self._sequences[one.name] = inspect(one).sequence
        self._sequences[folder.name] = 1 + max(self._sequences.values(), default=0)
        return self._sequences[folder.name]

    def _check_visible(self, folder: Place, token: str | None) -> None:
        """Check that this rank reaches the folder that rank 0 made.

        Raises:
            FolderNotSharedError: It does not.
        """
        rank = self._context.topology.rank
        if token is not None:
            check_shared(self._directory, token, rank)
        if not storage.sees(folder):
            raise FolderNotSharedError(
                f"rank {rank} does not see {folder}, which rank 0 made: save into a folder that every host mounts"
            )

    def close(self) -> None:
        """Let others write into the directory."""
        if self._lease is not None:
            self._lease.release()


def _own_save(own: OwnContent, plan: WritePlan, directory: Place, manifest: Manifest, rank: int) -> Save:
    return Save(
        directory=directory,
        folder=step_folder(directory, manifest.step),
        manifest=manifest,
        files=tuple(
            (file, tuple(map(own.tensor, file.entries))) for file in files_of(plan, rank, manifest.attempt)
        ),
        trees={tree_file(part, manifest.attempt): tree for part, tree in own.trees.items()},
        is_main=rank == 0,
    )


def _check_names(ranks: Sequence[Holdings]) -> None:
    """Refuse a tensor of models or replicated states that rank 0's state does not have: nothing would load it.

    Raises:
        StateError: There is one.
    """
    for rank, holdings in enumerate(ranks):
        for name in holdings.shared:
            if name not in ranks[0].shared:
                raise StateError(
                    f"rank {rank} has a part of {name.name!r} ({name.part}), and rank 0's state has no such tensor: "
                    "give all ranks a state of the same names, or what a rank has of its own as per_rank"
                )


def _check_metrics(metrics: Mapping[str, object], best: str | None) -> None:
    if metrics and best is not None and best not in metrics:
        raise ValueError(f"metrics={dict(metrics)!r} lacks best_metric={best!r}, which is to tell the best")
    for name, value in metrics.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise StateError(f"metrics[{name!r}]={value!r}: must be a number; give tensor.item() of a tensor")


@contextmanager
def _warned_of(what: str) -> Generator[None]:
    """Have what cannot be deleted be a warning: what became of the save is certain already."""
    try:
        yield
    except OSError as error:
        logger.warning("%s: %s", what, error)


def _delete_unlisted(folder: Place, *, keep: Mapping[str, FileRecord]) -> None:
    storage.remove(path for path in own_files(folder) if path.name not in keep)


def stage_save(context: Context, save: Save, buffer: HostBuffer) -> Save:
    """The same save, of copies of the tensors, which training does not change. Called on all ranks.

    Raises:
        OtherRankFailedError: Another rank has no memory for its copies; nothing was saved.
        RuntimeError: This one has none; nothing was saved.
    """
    staged: list[Save] = []
    try:
        on_all_ranks(
            context, lambda: staged.append(save.staged(buffer)), doing=f"the save of step {save.step}"
        )
    except BaseException:
        if save.is_main:
            save.discard()
        raise
    return staged[0]


def run_save(
    context: Context,
    save: Save,
    *,
    keep: Keep,
    on_block: Callable[[], None],
    gather: Callable[[Outcome], list[Outcome]] | None = None,
) -> Place:
    """Write a save, commit it, then delete what need not stay. Called on all ranks.

    Args:
        context: This process among the others.
        save: What `Saver.prepare` gave.
        keep: Which checkpoints stay.
        on_block: Called as a sign of progress.
        gather: How ranks tell each other what became of it; None: by the process group.

    Returns:
        The checkpoint's folder.

    Raises:
        OtherRankFailedError: Another rank failed; nothing was saved.
        OSError: The disk is full, or the folder cannot be written; nothing was saved.
    """
    try:
        records = on_all_ranks(
            context,
            lambda: [asdict(record) for record in save.write(on_block)],
            doing=f"the save of step {save.step}",
            gather=gather,
        )
        on_all_ranks(
            context,
            lambda: save.commit([record for own in records for record in own]) if save.is_main else None,
            doing=f"the commit of step {save.step}",
            gather=gather,
        )
    except BaseException:
        if save.is_main:
            save.discard()
        raise
    if save.is_main:
        save.clean_up(keep)
    return save.folder
