"""What checkpoints are held against: the same bytes by plain system calls, in turns that all ranks begin alike."""

import ctypes
import gc
import os
import sys
import time
from collections.abc import Callable, Sequence
from mmap import PAGESIZE as PAGE_BYTES
from mmap import mmap
from pathlib import Path

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

CHUNK_BYTES = 16 * 2**20
AT_HAND_BYTES = 3 * 2**30
Turn = Callable[[], float]


def timed(
    call: Callable[[], object], *, before: Callable[[], object] = lambda: None, level: bool = True
) -> Turn:
    """A turn that all ranks take together, and that lasts as long as the slowest."""

    def turn() -> float:
        before()
        if level:
            level_memory()
        barrier()
        start = time.perf_counter()
        call()
        barrier()
        return time.perf_counter() - start

    return turn


def barrier() -> None:
    """Wait for the other ranks."""
    if dist.is_initialized():
        dist.barrier()


def rank() -> int:
    """This rank."""
    return dist.get_rank() if dist.is_initialized() else 0


def num_ranks() -> int:
    """How many ranks there are."""
    return dist.get_world_size() if dist.is_initialized() else 1


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


class Raw:
    """The same bytes, by plain system calls: each rank writes its share into one file, or reads all of them."""

    def __init__(self, tensors: Sequence[Tensor], folder: Path) -> None:
        self.tensors = tensors
        self.folder = folder
        self.size_bytes = sum(tensor.nbytes for tensor in self.tensors)

    def write(self) -> None:
        """Write this rank's share, on the disk when it returns, and delete what was written last."""
        path = self.folder / f"raw-{rank()}"
        new = path.with_suffix(".new")
        with new.open("xb", buffering=0) as file:
            for tensor in self.tensors[rank() :: num_ranks()]:
                content = bytes_of(tensor)
                for start in range(0, len(content), CHUNK_BYTES):
                    file.write(content[start : start + CHUNK_BYTES])
            os.fsync(file.fileno())
        new.replace(path)

    def read(self, *, hashed: bool = False) -> None:
        """Read all files into new memory; with `hashed`, also hash it and copy it into the live tensors."""
        targets = [torch.empty_like(tensor) for tensor in self.tensors]
        for number in range(num_ranks()):
            with (self.folder / f"raw-{number}").open("rb", buffering=0) as file:
                for target in targets[number :: num_ranks()]:
                    content = bytes_of(target)
                    for start in range(0, len(content), CHUNK_BYTES):
                        piece = content[start : start + CHUNK_BYTES]
                        file.readinto(piece)
                        if hashed:
                            xxhash.xxh3_64_digest(piece)
        if hashed:
            for tensor, target in zip(self.tensors, targets, strict=True):
                tensor.copy_(target)


def evict(folder: Path) -> None:
    """Drop the pages of every file below a folder from the cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
    barrier()


def level_memory(size_bytes: int = AT_HAND_BYTES) -> None:
    """Give back what was freed, and have the machine at hand what a turn takes, on all ranks together.

    Each load finds new memory only, as in a process that has just begun; and no turn pays for pages that a virtual
    machine's host must first find, which take as long as writing them to the disk and hit one turn or another.
    """
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
    with mmap(-1, size_bytes // num_ranks()) as memory:
        for start in range(0, len(memory), PAGE_BYTES):
            memory[start] = 1
