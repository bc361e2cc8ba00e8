"""Agree on a save among all ranks: its content, which rank writes what, and its folder."""

import logging
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any
from uuid import uuid4

from drivetrain_checkpoint.errors import FolderNotSharedError, StateError
from drivetrain_checkpoint.format.layout import (
    STATE_PART,
    has_manifest,
    model_part,
    next_attempt,
    own_files,
    rank_part,
    step_folder,
    step_folders,
    tree_file,
)
from drivetrain_checkpoint.format.manifest import Manifest, encode_plan
from drivetrain_checkpoint.loading.discovery import find_checkpoints, inspect
from drivetrain_checkpoint.planning.file_list import TensorFiles
from drivetrain_checkpoint.planning.holdings import Holdings, joined
from drivetrain_checkpoint.planning.save_content import Content, OwnContent, own_content
from drivetrain_checkpoint.planning.write_plan import plan_writes
from drivetrain_checkpoint.saving.replicas import Replicas
from drivetrain_checkpoint.saving.transaction import Save
from drivetrain_checkpoint.saving.writer_lock import check_shared, lock_of
from drivetrain_checkpoint.settings import CheckpointSettings
from drivetrain_checkpoint.storage.place import Place, storage_of
from drivetrain_state import Context, broadcast_object, gather_object
from drivetrain_state.collectives.collective_errors import on_all_ranks, on_main

logger = logging.getLogger(__name__)


class SaveCoordinator:
    """The planner of saves into a directory, which agrees with the other ranks; later saves use the plan again."""

    def __init__(self, context: Context, directory: Place, settings: CheckpointSettings) -> None:
        self._context = context
        self._directory = directory
        self._settings = settings
        self._digests: list[str] = []
        self._tensor_files: TensorFiles | None = None
        self._sequences: dict[str, int] = {}  # by folder name
        self._spared: frozenset[str] | None = None
        self._lock = lock_of(directory)

    def prepare(
        self, step: int, content: Content, *, continues: bool, replicas: Replicas | None = None
    ) -> Save:
        """Agree on a save; write nothing but an empty folder. Called on all ranks, by the main thread.

        Raises the errors of `Checkpointer.save`.
        """
        context, topology = self._context, self._context.topology
        doing = f"the save of step {step}"
        encoded: list[OwnContent] = []

        def encode() -> tuple[str, str]:
            encoded.append(self._encode(step, content))
            return str(step_folder(self._directory, step)), encoded[0].holdings.digest()

        told = on_all_ranks(context, encode, doing=doing)
        (own,) = encoded
        tensor_files = self._agree(told, own.holdings)
        manifest, token = on_main(context, lambda: self._start(step, content, continues), doing=doing)
        folder, rank = step_folder(self._directory, step), topology.rank

        def check() -> None:
            if token is not None:
                check_shared(self._directory, token, rank)
            if not storage_of(folder).sees(folder):
                raise FolderNotSharedError(
                    f"rank {rank} does not see {folder}, which rank 0 made: save into a folder that every host mounts"
                )

        return Save(
            folder=folder,
            settings=self._settings,
            manifest=manifest,
            tensor_files=tensor_files,
            files=tuple((file, tuple(map(own.tensor, file.entries))) for file in tensor_files.files_of(rank)),
            trees={tree_file(part, manifest.attempt): tree for part, tree in own.trees.items()},
            is_main=topology.is_main,
            spared=self._spared or frozenset(),
            replicas=replicas,
            check=check,
        )

    def _encode(self, step: int, content: Content) -> OwnContent:
        """Encode the states of this rank, and refuse invalid ones before anything is written."""
        if type(step) is not int or step < 0:
            raise ValueError(f"step={step!r}: an integer from 0 on is allowed")
        encode_plan(content.plan)
        metrics: Any = content.metrics
        best = self._settings.best_metric
        if not isinstance(metrics, Mapping):
            raise StateError(f'metrics={metrics!r}: give numbers by name, such as {{"loss": 0.3}}')
        if metrics and best is not None and best not in metrics:
            raise ValueError(
                f"metrics={dict(metrics)!r} lacks best_metric={best!r}, the metric that rates checkpoints"
            )
        for name, value in metrics.items():
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise StateError(
                    f"metrics[{name!r}]={value!r}: must be a number; give tensor.item() of a tensor"
                )
        if self._context.topology.is_main and has_manifest(self._directory):
            raise ValueError(
                f"{self._directory} is a checkpoint itself: name the folder that holds the checkpoints"
            )
        return own_content(content, self._context.topology.rank, allow_pickle=self._settings.allow_pickle)

    def _agree(self, told: Sequence[tuple[str, str]], holdings: Holdings) -> TensorFiles:
        """Plan which rank writes what; keep the last plan if the ranks hold the same shards as last time."""
        if len({folder for folder, _ in told}) > 1:
            shown = ", ".join(f"rank {rank}: {folder}" for rank, (folder, _) in enumerate(told))
            raise ValueError(
                f"save() would write different folders ({shown}); save the same step into the same directory on all "
                "ranks"
            )
        digests = [digest for _, digest in told]
        if self._tensor_files is None or digests != self._digests:
            main = broadcast_object(self._context, holdings.main_names())
            ranks = gather_object(self._context, holdings.told(main))
            self._tensor_files = TensorFiles(plan_writes(*joined(main, ranks)))
            self._digests = digests
        return self._tensor_files

    def _start(self, step: int, content: Content, continues: bool) -> tuple[Manifest, str | None]:
        """Make the folder and begin the manifest. Called on rank 0.

        If this step has a committed checkpoint, its files stay until the new files are committed.
        """
        if self._spared is None:  # at the first save only: later on, this run's own checkpoints are there too
            earlier = [] if continues else find_checkpoints(self._directory)
            names = [one.folder.name for one in earlier if one.committed]
            if names:
                logger.warning(
                    "%s holds %s checkpoints of an earlier run, %s the newest, and this run has loaded none of them: "
                    "they stay whatever keep_last says, but a save of the same step replaces one; load before the "
                    "first save to go on from them, or give each run a folder of its own",
                    self._directory,
                    len(names),
                    names[0],
                )
            self._spared = frozenset(names)
        token = self._lock.take() if self._lock is not None else None
        folder = step_folder(self._directory, step)
        if not has_manifest(folder):
            storage_of(folder).remove(own_files(folder))
        # The manifest of each checkpoint is read only once.
        for one in step_folders(self._directory):
            if one.name not in self._sequences:
                self._sequences[one.name] = inspect(one).sequence
        sequence = self._sequences[folder.name] = 1 + max(self._sequences.values(), default=0)
        attempt, world_size = next_attempt(folder), self._context.topology.world_size
        storage_of(folder).make_folder(folder)
        parts = [*map(model_part, content.models), STATE_PART, *map(rank_part, range(world_size))]
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
            tensors={part: {} for part in parts},
            libraries={"python": platform.python_version()}
            | {name: version(name) for name in ("torch", "safetensors", "drivetrain-checkpoint")},
            plan=content.plan,
            metrics=content.metrics,
        )
        return manifest, token

    def close(self) -> None:
        """Release the directory, so that another run may write into it."""
        if self._lock is not None:
            self._lock.release()
