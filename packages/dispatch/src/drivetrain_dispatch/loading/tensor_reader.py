"""Memory for the tensors of a load, and their values: read piece by piece, by several threads."""

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
from drivetrain_dispatch.files.weight_source import WeightSource
from drivetrain_dispatch.loading.load_plan import Arrival
from drivetrain_dispatch.loading.state_dict_diff import Stored
from drivetrain_dispatch.model.dtensor import Box, range_of, shape_of
from drivetrain_dispatch.planning.memory_budget import free_bytes

PIECE_BYTES = 8 * 2**20  # of a file: large enough for a disk, small enough beside any tensor that matters
_MOST_THREADS = 4

Progress = Callable[[int, int], None]


class Piece(NamedTuple):
    """Elements of a tensor that are read at once, counted in its own order.

    Attributes:
        name: The checkpoint's.
        dtype: In the file.
        start: The first, counted in what this rank has of the tensor.
        stop: The end.
        skipped: Elements of the tensor before what this rank has.
        box: What this rank has, where that lies in the file in many places; the piece is all of it.
    """

    name: str
    dtype: torch.dtype
    start: int
    stop: int
    skipped: int = 0
    box: Box | None = None

    @property
    def size_bytes(self) -> int:
        """What it takes in the file."""
        return (self.stop - self.start) * self.dtype.itemsize


def allocate(arrivals: Sequence[Arrival], into: MutableMapping[str, Tensor]) -> None:
    """Take the memory of all tensors that are read, before the first is.

    Args:
        arrivals: The tensors.
        into: Where they are put, by the checkpoint's name.

    Raises:
        LoadError: A device has no room; `into` is empty then.
    """
    read = [arrival for arrival in arrivals if arrival.is_read]
    try:
        _check_host(read)
        for index, arrival in enumerate(read):
            if arrival.is_packed:  # takes its memory when it is
                continue
            try:
                into[arrival.stored] = torch.empty(arrival.shape, dtype=arrival.dtype, device=arrival.place)
            except (RuntimeError, MemoryError) as error:  # torch knows no other reason here
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

    Beyond their memory, each thread holds `PIECE_BYTES` of the host's, where a tensor's device or dtype is not that
    of its file.

    Args:
        stored: What the checkpoint holds, in the order of its files.
        targets: The tensors' memory, by the checkpoint's name.
        files: The file of each, by the checkpoint's name.
        boxes: What this rank has of a tensor, of those that are divided.
        num_threads: That read at the same time; None takes as many as there are processors, four at most.
        progress: Called in this thread with the bytes that were read and all that are.

    Raises:
        WeightFilesError: A file is cut.
    """
    threads = min(_MOST_THREADS, os.cpu_count() or 1) if num_threads is None else num_threads
    pieces = pieces_of(stored, targets, boxes or {})
    buffers: SimpleQueue[Tensor] = SimpleQueue()
    for _ in range(threads):
        buffers.put(staging_buffer(targets.values()))

    def read(piece: Piece) -> int:
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
            # Few are handed over at a time, so that an error or an interrupt ends the load at once.
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


def _expect(piece: Piece, file: WeightSource) -> None:
    """Have the system begin to read a piece, of which it knows where it lies."""
    if piece.box is None:
        file.expect(piece.name, start=piece.skipped + piece.start, size_bytes=piece.size_bytes)


class WholeProgress:
    """One count of what several readings read.

    Args:
        progress: Called with the bytes that all of them have read, and all that are.
        all_bytes: Those.
    """

    def __init__(self, progress: Progress, all_bytes: int) -> None:
        self._progress = progress
        self._all_bytes = all_bytes
        self._before_bytes = 0

    def __call__(self, done_bytes: int, all_bytes: int) -> None:
        """Count what one reading has read of what it reads."""
        self._progress(self._before_bytes + done_bytes, self._all_bytes)
        if done_bytes == all_bytes:
            self._before_bytes += all_bytes


def pieces_of(
    stored: Mapping[str, Stored], wanted: Container[str], boxes: Mapping[str, Box] | None = None
) -> list[Piece]:
    """The tensors that are wanted, in pieces; as one where a file has its elements in another order. Pure."""
    pieces: list[Piece] = []
    for name, (shape, dtype, divisible) in stored.items():
        if name not in wanted:
            continue
        box = (boxes or {}).get(name)
        whole = (0, math.prod(shape)) if box is None else range_of(box, shape)
        if box is not None and (whole is None or not divisible):
            pieces.append(Piece(name, dtype, 0, math.prod(shape_of(box)), box=box))
        elif whole is not None:
            numel = whole[1] - whole[0]
            step = PIECE_BYTES // dtype.itemsize if divisible else max(1, numel)
            pieces += (
                Piece(name, dtype, start, min(start + step, numel), skipped=whole[0])
                for start in range(0, numel, step)
            )
    return pieces


def staging_buffer(targets: Iterable[Tensor], *, size_bytes: int = PIECE_BYTES) -> Tensor:
    """Bytes of the host, from which an accelerator copies directly where one of the tensors is on it."""
    pinned = any(target.is_cuda for target in targets)
    return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=pinned)


def check_copies(arrivals: Sequence[Arrival], files: Mapping[str, WeightSource]) -> None:
    """Check that what a checkpoint has twice for one tensor of the model is the same.

    Raises:
        TiedParametersError: It is not.
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
    """Whether two mapped tensors of a shape and dtype hold the same bytes."""
    flat = [tensor.reshape(-1).view(torch.uint8) for tensor in (one, other)]
    return all(
        torch.equal(*(tensor[start : start + PIECE_BYTES] for tensor in flat))
        for start in range(0, len(flat[0]), PIECE_BYTES)
    )


@contextmanager
def _threads(count: int) -> Generator[ThreadPoolExecutor]:
    """Threads that end with the block: what has not begun is not read."""
    pool = ThreadPoolExecutor(count, thread_name_prefix="load")
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _check_host(arrivals: Sequence[Arrival]) -> None:
    """Check that the host's tensors have room: the system hands out more than it has, and ends who uses it.

    Raises:
        LoadError: They have none.
    """
    free = free_bytes(torch.device("cpu"))
    taken = 0
    here = [arrival for arrival in arrivals if str(arrival.place) == "cpu"]
    for index, arrival in enumerate(here):
        taken += arrival.size_bytes
        if free is not None and taken > free:
            raise no_room(arrival, here[:index], here, free=free - taken + arrival.size_bytes)


def no_room(
    arrival: Arrival, before: Sequence[Arrival], planned: Sequence[Arrival], *, free: int | None = None
) -> LoadError:
    """What to say where a device has no room for a tensor.

    Args:
        arrival: The tensor.
        before: Those that have room.
        planned: All that are to.
        free: Bytes that the device has left, where that is known.
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
