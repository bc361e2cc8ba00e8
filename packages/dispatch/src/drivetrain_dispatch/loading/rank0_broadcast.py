"""Read a checkpoint on one rank, and broadcast it to all ranks."""

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from drivetrain_dispatch.errors import LoadError
from drivetrain_dispatch.loading.checkpoint_tensors import CheckpointTensors
from drivetrain_dispatch.loading.tensor_reader import (
    PIECE_BYTES,
    ReadRange,
    Result,
    pieces_of,
    staging_buffer,
)
from drivetrain_weights import Box

# The errors of a step that are reported to the other ranks.
_FAILURES = (ValueError, RuntimeError, OSError, MemoryError)


class Rank0Broadcast:
    """A reader on rank 0 that reads for all ranks of a process group. All ranks must call each method."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        if not dist.is_initialized():
            raise RuntimeError(
                "read_by='rank 0' hands on what rank 0 reads: call torch.distributed.init_process_group first, or "
                "give read_by='each'"
            )
        self._group = group
        self._is_reader = dist.get_rank(group) == 0
        # Collectives take tensors on the CPU if the group has a backend for it.
        capable = dist.Backend.backend_capability
        kinds = [
            kind
            for part in str(dist.get_backend(group)).split(",")
            for kind in capable.get(part.split(":")[-1], ["cpu"])
        ]
        self._device = torch.device("cpu" if "cpu" in kinds else kinds[0])

    def together(self, step: Callable[[], Result]) -> Result:
        """Run a step on each rank; if the step fails on any rank, raise an error on all."""
        result: list[Result] = []
        failure: Exception | None = None
        try:
            result.append(step())
        except _FAILURES as error:
            failure = error
        said: list[str | None] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(said, failure and f"{type(failure).__name__}: {failure}", group=self._group)
        if failure is not None:
            raise failure
        for rank, text in enumerate(said):
            if text is not None:
                raise LoadError(
                    f"rank {rank} could not load, and so no rank did; the model is as it was. {text}"
                )
        return result[0]

    def open(self, path: Path, step: Callable[[], CheckpointTensors]) -> CheckpointTensors:
        """Open a checkpoint with `step` on rank 0; the other ranks get only the descriptions of its tensors."""
        opened = self.together(lambda: step() if self._is_reader else None)
        specs = [opened and dict(opened.specs)]
        dist.broadcast_object_list(specs, group=self._group, group_src=0)
        return opened or CheckpointTensors(path=path, specs=specs[0] or {}, sources={})

    def read(
        self,
        checkpoint: CheckpointTensors,
        targets: Mapping[str, Tensor],
        boxes: Mapping[str, Box],
        progress: Callable[[int], object],
    ) -> None:
        """Read all tensors on rank 0, for every rank with memory for them; no tensor may be sharded."""
        pieces = pieces_of(checkpoint.specs, self.wanted_by_any(targets), boxes)
        room = max([PIECE_BYTES, *(piece.size_bytes for piece in pieces)]) + 1
        # Rank 0 reads into one while it broadcasts the other.
        buffers = [staging_buffer(targets.values(), size_bytes=room) for _ in range(2)]
        failure: Exception | None = None
        with ThreadPoolExecutor(1, thread_name_prefix="load") as thread:

            def read_piece(piece: ReadRange, buffer: Tensor) -> None:
                values = buffer[: piece.size_bytes].view(piece.dtype)
                checkpoint.sources[piece.name].read_piece(values, start=piece.start, buffer=buffer)

            def begin(index: int) -> Future[None] | None:
                if not self._is_reader or index == len(pieces):
                    return None
                return thread.submit(read_piece, pieces[index], buffers[index % 2])

            reading = begin(0) if pieces else None
            for index, piece in enumerate(pieces):
                ended, reading = reading, begin(index + 1)
                self._broadcast_piece(piece, targets, buffers[index % 2][: piece.size_bytes + 1], ended)
                try:
                    if failure is None:
                        progress(piece.size_bytes)
                except Exception as error:  # noqa: BLE001 raised at the end: the other ranks wait for the next pieces
                    failure = error
        if failure is not None:
            raise LoadError("progress failed; the model is as it was") from failure

    def wanted_by_any(self, names: Iterable[str]) -> set[str]:
        """Return the union of the names that the ranks pass."""
        said: list[list[str]] = [[]] * dist.get_world_size(self._group)
        dist.all_gather_object(said, list(names), group=self._group)
        return {name for each in said for name in each}

    def _broadcast_piece(
        self, piece: ReadRange, targets: Mapping[str, Tensor], content: Tensor, reading: Future[None] | None
    ) -> None:
        """Broadcast a piece, followed by a byte that says whether the read succeeded."""
        failure = None if reading is None else reading.exception()
        if self._is_reader:
            content[-1] = failure is None
        handed = content.to(self._device)
        dist.broadcast(handed, group=self._group, group_src=0)
        if failure is not None:
            raise failure
        if not handed[-1].item():
            raise LoadError("rank 0 could not read on, see the error of rank 0; the model is as it was")
        if (target := targets.get(piece.name)) is not None:
            values = handed[:-1].view(piece.dtype)
            target.view(-1)[piece.start : piece.stop].copy_(values)
