"""Write a save as a transaction: all ranks write their files, then rank 0 commits them with the manifest."""

import json
import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from itertools import islice
from typing import Any

import xxhash
from torch import Tensor

from drivetrain_checkpoint.errors import FolderNotSharedError
from drivetrain_checkpoint.format.checksummed_io import FileRecord, HashedWriter
from drivetrain_checkpoint.format.layout import own_files, path_in_state
from drivetrain_checkpoint.format.manifest import Manifest, commit_manifest
from drivetrain_checkpoint.format.state_tree import Json
from drivetrain_checkpoint.loading.discovery import find_checkpoints, inspect
from drivetrain_checkpoint.planning.file_list import PlannedFile, TensorFiles
from drivetrain_checkpoint.saving.host_buffer import HostBuffer, Overlap, on_host
from drivetrain_checkpoint.saving.replicas import Replicas
from drivetrain_checkpoint.saving.retention import delete, plan_retention
from drivetrain_checkpoint.settings import CheckpointSettings
from drivetrain_checkpoint.storage.place import Place, storage_of
from drivetrain_state import Context
from drivetrain_state.collectives.collective_errors import Outcome, on_all_ranks, on_each_rank
from drivetrain_weights.safetensors_layout import bytes_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """A save that all ranks have agreed on, with the values that this rank writes.

    Attributes:
        manifest: The manifest, still without files, tensors and time.
        tensor_files: The tensor files of all ranks.
        spared: The names of checkpoints of an earlier run, which retention never deletes.
        replicas: The tensors that all ranks must hold alike for the commit; None for no comparison.
        overlap: The copies to make before anything is written, while training continues.
        check: A check that this rank sees the folder, to run before any copy or write; None once it has run.
    """

    folder: Place
    settings: CheckpointSettings
    manifest: Manifest
    tensor_files: TensorFiles
    files: tuple[tuple[PlannedFile, tuple[Tensor, ...]], ...]
    trees: Mapping[str, Json]
    is_main: bool
    spared: frozenset[str] = frozenset()
    replicas: Replicas | None = None
    overlap: Overlap | None = None
    check: Callable[[], None] | None = None

    @property
    def step(self) -> int:
        """The optimizer step of the save."""
        return self.manifest.step

    def staged(self, buffer: HostBuffer, changes_in_step: Callable[[str], bool] | None) -> "Save":
        """Return the same save with host copies of the tensors, which training does not change."""
        if self.check is not None:
            self.check()
        # Tensors that only an optimizer step changes may be copied beside the training, until that step: the buffer
        # then computes the sums of replicas from its copies. Otherwise the sums are computed first.
        later: set[int] = set()
        if changes_in_step is not None:
            paths = [path_in_state(*entry.tensor) for file, _ in self.files for entry in file.entries]
            later = {index for index, path in enumerate(paths) if path is not None and changes_in_step(path)}
        elif self.replicas is not None:
            self.replicas.sums()
        copies, overlap = buffer.stage(
            [tensor for _, tensors in self.files for tensor in tensors],
            later,
            self.replicas if changes_in_step is not None else None,
        )
        left = iter(copies)
        files = tuple((file, tuple(islice(left, len(tensors)))) for file, tensors in self.files)
        return replace(self, files=files, overlap=overlap, check=None)

    def write(self, on_block: Callable[[], None]) -> list[FileRecord]:
        """Write this rank's files and return their records; the files are durable when this returns."""
        if self.check is not None:
            self.check()
        if self.overlap is not None:
            self.overlap.run(on_block)
        records: list[FileRecord] = []
        for file, tensors in self.files:
            path = self.folder / file.name(self.manifest.attempt)
            with HashedWriter(path, on_block=on_block) as writer:
                writer.write(file.layout.header)
                for index in file.layout.order:
                    staged = on_host(tensors[index])
                    writer.write(bytes_of(staged))
                records.append(writer.record())
        for name, tree in self.trees.items():
            with HashedWriter(self.folder / name, on_block=on_block) as writer:
                writer.write(json.dumps(tree, allow_nan=False).encode())
                records.append(writer.record())
        return records

    def digest(self) -> str:
        """Return a hash of the replicas' sums; ranks with equal replicas return equal hashes."""
        return "" if self.replicas is None else xxhash.xxh3_128_hexdigest(bytes_of(self.replicas.sums()))

    def commit(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Write the manifest, which commits the files that all ranks have written. Called on rank 0."""
        files = {record["name"]: FileRecord.from_json(record["name"], record) for record in records}
        sizes = storage_of(self.folder).sizes_in(self.folder)
        if lost := sorted(name for name, record in files.items() if sizes.get(name) != record.size_bytes):
            raise FolderNotSharedError(
                f"rank 0 does not see in {self.folder} what was written there, {lost[0]} for one: save into a folder "
                "that every host mounts, or a store that every process reaches"
            )
        manifest = replace(
            self.manifest,
            files=files,
            tensors={**self.manifest.tensors, **self.tensor_files.divisions},
            saved_at=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        commit_manifest(self.folder, manifest)

    @contextmanager
    def discarded_on_error(self) -> Generator[None]:
        """Run the block, which fails on all ranks or on none; if it fails, delete the files of the save."""
        try:
            yield
        except BaseException:
            if self.is_main:
                with _warned_of(f"{self.folder}: leftovers of a save that was given up stay"):
                    committed = inspect(self.folder).manifest
                    if committed is None:
                        delete([self.folder])
                    elif committed.save_id != self.manifest.save_id:  # an earlier save was committed
                        _delete_unlisted(self.folder, keep=committed.files)
            raise

    def clean_up(self) -> None:
        """Delete the files that this save replaced, then old checkpoints. Called on rank 0 after the commit."""
        with _warned_of(f"{self.folder.parent}: old checkpoints stay"):
            committed = inspect(self.folder).manifest
            if committed is not None:
                _delete_unlisted(self.folder, keep=committed.files)
            if self.settings.keep_last is not None:
                found = find_checkpoints(self.folder.parent)
                rest = [one for one in found if one.folder.name not in self.spared]
                delete(plan_retention(rest, self.settings))


@contextmanager
def _warned_of(what: str) -> Generator[None]:
    """Run the block and log an `OSError` as a warning: a failed deletion does not change the outcome of the save."""
    try:
        yield
    except OSError as error:
        logger.warning("%s: %s", what, error)


def _delete_unlisted(folder: Place, *, keep: Mapping[str, FileRecord]) -> None:
    storage_of(folder).remove(path for path in own_files(folder) if path.name not in keep)


def stage_save(
    context: Context, save: Save, buffer: HostBuffer, changes_in_step: Callable[[str], bool] | None
) -> Save:
    """Return the same save with host copies of the tensors; raise if a rank lacks memory. Called on all ranks."""
    with save.discarded_on_error():
        return on_each_rank(
            context, lambda: save.staged(buffer, changes_in_step), doing=f"the save of step {save.step}"
        )


def run_save(
    context: Context,
    save: Save,
    *,
    on_block: Callable[[], None],
    gather: Callable[[Outcome], list[Outcome]] | None = None,
) -> None:
    """Write a save, commit it, then delete old checkpoints; after an error nothing was saved. Called on all ranks.

    `on_block` is called after each written block. `gather` collects the outcomes of all ranks; on ranks other than 0,
    only rank 0's value is needed. None gathers with the process group.
    """

    def write() -> tuple[list[dict[str, Any]], str]:
        return [asdict(record) for record in save.write(on_block)], save.digest()

    def commit() -> bool:
        if not save.is_main:
            return True
        groups = [range(len(by_rank))] if save.replicas is None else save.replicas.groups
        is_alike = all(len({by_rank[rank][1] for rank in ranks}) == 1 for ranks in groups)
        if is_alike:
            save.commit([record for records, _ in by_rank for record in records])
        return is_alike

    with save.discarded_on_error():
        by_rank = on_all_ranks(context, write, doing=f"the save of step {save.step}", gather=gather)
        doing = f"the commit of step {save.step}"
        is_alike, *_ = on_all_ranks(context, commit, doing=doing, gather=gather)
        if not is_alike:  # rank 0 words the error from the sums of all ranks
            replicas, doing = save.replicas, f"the comparison of replicas at step {save.step}"
            assert replicas is not None
            sums: list[int] = replicas.sums().tolist()
            of_ranks = on_all_ranks(context, lambda: sums, doing=doing, gather=gather)
            told, *_ = on_all_ranks(
                context,
                lambda: replicas.explain(of_ranks) if save.is_main else "",
                doing=doing,
                gather=gather,
            )
            replicas.refuse(told)
    if save.is_main:
        save.clean_up()
