"""Read the values of a load's tensors, piece by piece in several threads."""

import math
import os
from collections.abc import Callable, Container, Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from drivetrain_dispatch.device_copies import copies_aside
from drivetrain_dispatch.loading.checkpoint_tensors import CheckpointTensors, TensorSpec
from drivetrain_weights import Box

PIECE_BYTES = 8 * 2**20  # of a file: enough for a disk's full rate, and small beside large tensors
_MOST_THREADS = 4

Result = TypeVar("Result")


class ReadRange(NamedTuple):
    """A contiguous range of a tensor's elements, which is read at once."""

    name: str
    dtype: torch.dtype
    start: int  # the first element, counted in this rank's shard
    stop: int
    skipped: int = 0  # the number of elements of the tensor before this rank's shard
    # The position of this rank's shard if it is not contiguous in the file; the piece is the whole shard.
    box: Box | None = None

    @property
    def size_bytes(self) -> int:
        """The bytes of the piece in the file."""
        return (self.stop - self.start) * self.dtype.itemsize


class EachRank:
    """A reader of a checkpoint for this rank alone."""

    def __init__(self, num_threads: int | None = None) -> None:
        self._num_threads = min(_MOST_THREADS, os.cpu_count() or 1) if num_threads is None else num_threads

    def open(self, path: Path, step: Callable[[], CheckpointTensors]) -> CheckpointTensors:  # noqa: ARG002
        """Open the checkpoint with `step`."""
        return step()

    def together(self, step: Callable[[], Result]) -> Result:
        """Run a step. A reader for several ranks makes the step fail on all ranks if it fails on any."""
        return step()

    def wanted_by_any(self, names: Iterable[str]) -> set[str]:
        """Return the names; a reader for several ranks returns the union of all ranks' names."""
        return set(names)

    def read(
        self,
        checkpoint: CheckpointTensors,
        targets: Mapping[str, Tensor],
        boxes: Mapping[str, Box],
        progress: Callable[[int], object],
    ) -> None:
        """Read the values of all tensors that have memory, in several threads."""
        pieces, sources = pieces_of(checkpoint.specs, targets, boxes), checkpoint.sources
        # For tensors whose device or dtype is not that of their file.
        buffers: SimpleQueue[Tensor] = SimpleQueue()
        for _ in range(self._num_threads if pieces else 0):
            buffers.put(staging_buffer(targets.values()))

        def read(piece: ReadRange) -> int:
            name, buffer = piece.name, buffers.get()
            try:
                if piece.box is not None:
                    sources[name].read_box(targets[name], piece.box)
                    return piece.size_bytes
                target = targets[name].view(-1)[piece.start : piece.stop]
                sources[name].read_piece(target, start=piece.skipped + piece.start, buffer=buffer)
            finally:
                buffers.put(buffer)
            return piece.size_bytes

        waiting, running = iter(pieces), set[Future[int]]()
        pool = ThreadPoolExecutor(self._num_threads, thread_name_prefix="load")
        try:
            while True:
                # Few pieces are submitted at a time, so that an error or an interrupt ends the load at once.
                while len(running) < 2 * self._num_threads and (piece := next(waiting, None)) is not None:
                    if piece.box is None:  # else its position in the file is unknown
                        start = piece.skipped + piece.start
                        sources[piece.name].expect(start=start, size_bytes=piece.size_bytes)
                    running.add(pool.submit(read, piece))
                if not running:
                    return
                ended, running = wait(running, return_when=FIRST_COMPLETED)
                for future in ended:
                    progress(future.result())
        finally:
            pool.shutdown(cancel_futures=True)


def pieces_of(
    stored: Mapping[str, TensorSpec], wanted: Container[str], boxes: Mapping[str, Box]
) -> list[ReadRange]:
    """Return the pieces of wanted tensors. A tensor stored in another element order is one piece. Pure."""
    pieces: list[ReadRange] = []
    for name, (shape, dtype, divisible) in stored.items():
        if name not in wanted:
            continue
        box = boxes.get(name)
        whole = (0, math.prod(shape)) if box is None else box.flat_range(shape)
        if box is not None and (whole is None or not divisible):
            pieces.append(ReadRange(name, dtype, 0, box.num_elements, box=box))
        elif whole is not None:
            numel = whole[1] - whole[0]
            step = PIECE_BYTES // dtype.itemsize if divisible else max(1, numel)
            pieces += (
                ReadRange(name, dtype, start, min(start + step, numel), skipped=whole[0])
                for start in range(0, numel, step)
            )
    return pieces


def staging_buffer(targets: Iterable[Tensor], *, size_bytes: int = PIECE_BYTES) -> Tensor:
    """Return a byte buffer on the host, pinned if one of the tensors is on a device that copies from it."""
    pinned = any(copies_aside(target.device.type) for target in targets)
    return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=pinned)
