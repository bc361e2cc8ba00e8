"""Allocate the tensors of a load, and read their values piece by piece in several threads."""

import math
import os
from collections.abc import Callable, Container, Generator, Iterable, Mapping, MutableMapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from queue import SimpleQueue
from typing import NamedTuple

import torch
from torch import Tensor

from drivetrain_dispatch.errors import LoadError, TiedParametersError
from drivetrain_dispatch.loading.load_plan import PlannedTensor
from drivetrain_dispatch.loading.state_dict_diff import Stored
from drivetrain_dispatch.loading.weight_source import WeightSource
from drivetrain_dispatch.planning.memory_budget import free_bytes
from drivetrain_weights import Box

PIECE_BYTES = 8 * 2**20  # of a file: enough for a disk's full rate, and small beside large tensors
_MOST_THREADS = 4

Progress = Callable[[int, int], None]


class ReadRange(NamedTuple):
    """A range of a tensor's elements that are read at once, in the order of the tensor.

    Attributes:
        name: The name in the checkpoint.
        dtype: The dtype in the file.
        start: The first element, counted in this rank's shard.
        stop: The element after the last, counted in the same way.
        skipped: The number of elements of the tensor before this rank's shard.
        box: The position of this rank's shard if it is not contiguous in the file; the piece is the whole shard.
    """

    name: str
    dtype: torch.dtype
    start: int
    stop: int
    skipped: int = 0
    box: Box | None = None

    @property
    def size_bytes(self) -> int:
        """The bytes of the piece in the file."""
        return (self.stop - self.start) * self.dtype.itemsize


def allocate(arrivals: Sequence[PlannedTensor], into: MutableMapping[str, Tensor]) -> None:
    """Allocate all tensors that are read, before the first one is.

    Args:
        arrivals: The tensors of the load.
        into: The mapping that gets the memory, by the checkpoint's name.

    Raises:
        LoadError: A device has no room; `into` is empty then.
    """
    read = [arrival for arrival in arrivals if arrival.is_read]
    try:
        _check_host(read)
        for index, arrival in enumerate(read):
            if arrival.is_packed:  # allocated when it is packed
                continue
            try:
                into[arrival.stored] = torch.empty(arrival.shape, dtype=arrival.dtype, device=arrival.place)
            except (RuntimeError, MemoryError) as error:  # here torch raises only for lack of memory
                raise no_room(arrival, read[:index], read) from error
    except LoadError:
        into.clear()
        raise


def fill(
    stored: Mapping[str, Stored],
    targets: Mapping[str, Tensor],
    files: Mapping[str, WeightSource],
    *,
    boxes: Mapping[str, Box] | None = None,
    num_threads: int | None = None,
    progress: Progress | None = None,
) -> None:
    """Read the values of all tensors that have memory.

    Each thread also holds `PIECE_BYTES` of host memory, for tensors whose device or dtype is not that of their file.

    Args:
        stored: The tensors of the checkpoint, in the order of its files.
        targets: The memory of the tensors, by the checkpoint's name.
        files: The file of each tensor, by the checkpoint's name.
        boxes: The positions of this rank's shards, for tensors that are sharded.
        num_threads: The number of threads that read; None takes one per processor, four at most.
        progress: A function called in this thread with the bytes read so far and the total.

    Raises:
        WeightFilesError: A file is truncated.
    """
    threads = min(_MOST_THREADS, os.cpu_count() or 1) if num_threads is None else num_threads
    pieces = pieces_of(stored, targets, boxes or {})
    buffers: SimpleQueue[Tensor] = SimpleQueue()
    for _ in range(threads):
        buffers.put(staging_buffer(targets.values()))

    def read(piece: ReadRange) -> int:
        name, buffer = piece.name, buffers.get()
        try:
            if piece.box is not None:
                files[name].copy_box(name, targets[name], piece.box)
                return piece.size_bytes
            target = targets[name].view(-1)[piece.start : piece.stop]
            files[name].copy(name, target, start=piece.skipped + piece.start, buffer=buffer)
        finally:
            buffers.put(buffer)
        return piece.size_bytes

    all_bytes, done_bytes = sum(piece.size_bytes for piece in pieces), 0
    with _threads(threads) as pool:
        waiting = iter(pieces)
        running: set[Future[int]] = set()
        while True:
            # Few pieces are submitted at a time, so that an error or an interrupt ends the load at once.
            while len(running) < 2 * threads and (piece := next(waiting, None)) is not None:
                _expect(piece, files[piece.name])
                running.add(pool.submit(read, piece))
            if not running:
                return
            ended, running = wait(running, return_when=FIRST_COMPLETED)
            for future in ended:
                done_bytes += future.result()
                if progress is not None:
                    progress(done_bytes, all_bytes)


def _expect(piece: ReadRange, file: WeightSource) -> None:
    """Ask the system to begin reading a piece, if its position in the file is known."""
    if piece.box is None:
        file.expect(piece.name, start=piece.skipped + piece.start, size_bytes=piece.size_bytes)


class WholeProgress:
    """The progress of several reads together.

    Args:
        progress: A function called with the bytes that all reads have read so far and the total.
        all_bytes: The total bytes of all reads.
    """

    def __init__(self, progress: Progress, all_bytes: int) -> None:
        self._progress = progress
        self._all_bytes = all_bytes
        self._before_bytes = 0

    def __call__(self, done_bytes: int, all_bytes: int) -> None:
        """Count the bytes that one read has read so far of its total."""
        self._progress(self._before_bytes + done_bytes, self._all_bytes)
        if done_bytes == all_bytes:
            self._before_bytes += all_bytes


def pieces_of(
    stored: Mapping[str, Stored], wanted: Container[str], boxes: Mapping[str, Box] | None = None
) -> list[ReadRange]:
    """Return the pieces of wanted tensors; a tensor that its file holds in another order is one piece. Pure."""
    pieces: list[ReadRange] = []
    for name, (shape, dtype, divisible) in stored.items():
        if name not in wanted:
            continue
        box = (boxes or {}).get(name)
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
    """Return a byte buffer on the host, pinned if one of the tensors is on a CUDA device."""
    pinned = any(target.is_cuda for target in targets)
    return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=pinned)


def check_copies(arrivals: Sequence[PlannedTensor], files: Mapping[str, WeightSource]) -> None:
    """Check that a checkpoint's tensors for one tensor of the model are equal.

    Raises:
        TiedParametersError: Two of the tensors differ.
    """
    for arrival in arrivals:
        for copy in arrival.copies:
            one, other = (files[name].tensor(name) for name in (arrival.stored, copy))
            if not _same(one, other):
                raise TiedParametersError(
                    f"{arrival.stored!r} and {copy!r} are one tensor in the model but differ in the file: untie "
                    "them, or leave one out (rename gives None for it)"
                )


def _same(one: Tensor, other: Tensor) -> bool:
    """Return whether two mapped tensors of the same shape and dtype hold the same bytes."""
    flat = [tensor.reshape(-1).view(torch.uint8) for tensor in (one, other)]
    return all(
        torch.equal(*(tensor[start : start + PIECE_BYTES] for tensor in flat))
        for start in range(0, len(flat[0]), PIECE_BYTES)
    )


@contextmanager
def _threads(count: int) -> Generator[ThreadPoolExecutor]:
    """Run the block with a pool of threads; its end cancels reads that have not begun."""
    pool = ThreadPoolExecutor(count, thread_name_prefix="load")
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _check_host(arrivals: Sequence[PlannedTensor]) -> None:
    """Check that the host has room for its tensors, as the system overcommits memory and kills the process later.

    Raises:
        LoadError: The host has no room.
    """
    free = free_bytes(torch.device("cpu"))
    taken = 0
    here = [arrival for arrival in arrivals if str(arrival.place) == "cpu"]
    for index, arrival in enumerate(here):
        taken += arrival.size_bytes
        if free is not None and taken > free:
            raise no_room(arrival, here[:index], here, free=free - taken + arrival.size_bytes)


def no_room(
    arrival: PlannedTensor,
    before: Sequence[PlannedTensor],
    planned: Sequence[PlannedTensor],
    *,
    free: int | None = None,
) -> LoadError:
    """Return the error for a tensor that a device has no room for.

    Args:
        arrival: The tensor without room.
        before: The tensors that have room.
        planned: All tensors that need room.
        free: The bytes that the device has left, if known.
    """
    place = arrival.place
    taken = sum(other.size_bytes for other in before if other.place == place)
    wanted = sum(other.size_bytes for other in planned if other.place == place)
    if free is None and place != "disk":
        free = free_bytes(place)
    fits = "" if free is None else f", {_shown(free)} are left, so about {_shown(taken + free)} fit"
    return LoadError(
        f"{place} has no room for {arrival.names[0]!r} ({_shown(arrival.size_bytes)}): of the {_shown(wanted)} that "
        f"device_map puts there {_shown(taken)} went before{fits}. Put less there (on another device, or on 'disk'), "
        "or give a smaller dtype. The model is as it was"
    )


def _shown(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:,.1f} MB"
