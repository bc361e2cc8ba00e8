"""What sharding a loader over ranks costs per batch beyond the raw DataLoader: two processes, CPU.

    uv run --group bench python benchmarks/loader.py

Map-style datasets are sharded by index; iterable ones are read by rank 0 alone, which hands every rank its batches.
The raw loader of an iterable dataset reads on each rank for itself, which is right only where every rank has a stream
of its own: it is the floor, not a way to get the same result. Without workers, the last row is a raw loader that
reads the batches of both ranks, as rank 0 must: what drivetrain takes beyond it is the handing out. With workers, raw
loaders have one on each rank, and rank 0 has two where it reads for both.
"""

import argparse
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from rounds import Table, installed, on_two_ranks, report, take_turns
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset, get_worker_info

BATCH_SIZE = 32  # samples a rank


class Stream(IterableDataset[dict[str, Any]]):
    """Samples as a file reader would yield them: a dict of a fresh tensor of `num_floats` numbers and a label.

    Args:
        num_samples: How many.
        num_floats: Of each.
        compressed: Each is inflated from zlib's format, as images and records are, which takes longer than all else.
    """

    def __init__(self, num_samples: int, num_floats: int, *, compressed: bool = False) -> None:
        self.num_samples = num_samples
        self.num_floats = num_floats
        self.packed = zlib.compress(torch.randn(num_floats).numpy().tobytes()) if compressed else None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for index in range(first, self.num_samples, step):
            yield {"input": self.sample(float(index)), "label": index % 10}

    def sample(self, value: float) -> torch.Tensor:
        """A sample's numbers."""
        if self.packed is None:
            return torch.full((self.num_floats,), value)
        return torch.frombuffer(bytearray(zlib.decompress(self.packed)), dtype=torch.float32)


def timed(loader: Iterable[Any], num_batches: int) -> Callable[[], float]:
    """A turn: the seconds of one batch, over an epoch of `num_batches` on every rank. Called on all ranks."""

    def turn() -> float:
        dist.barrier()
        start = time.perf_counter()
        count = sum(1 for _ in loader)
        assert count == num_batches, (count, num_batches)
        return (time.perf_counter() - start) / num_batches

    return turn


def contestants(raw: Iterable[Any], prepare: Callable[[], DataLoader[Any]]) -> dict[str, Iterable[Any]]:
    """The raw loader, and a fresh one as each library prepares it."""
    from drivetrain import Accelerator

    loaders: dict[str, Iterable[Any]] = {"raw DataLoader": raw}
    loaders["drivetrain"] = Accelerator(cpu=True).prepare(prepare())
    if installed("accelerate"):
        from accelerate import Accelerator as Peer

        loaders["Accelerate"] = Peer(cpu=True).prepare(prepare())
    return loaders


def map_style(num_batches: int) -> dict[str, Iterable[Any]]:
    """Contestants over a shuffled map-style dataset."""
    data = TensorDataset(torch.randn(2 * num_batches * BATCH_SIZE, 16))
    raw = DataLoader(data, batch_size=BATCH_SIZE, sampler=DistributedSampler(data, shuffle=True))
    return contestants(raw, lambda: DataLoader(data, batch_size=BATCH_SIZE, shuffle=True))


def dispatched(
    num_batches: int, num_floats: int, *, workers: int = 0, compressed: bool = False
) -> dict[str, Iterable[Any]]:
    """Contestants over an iterable dataset that rank 0 reads for all, by as many workers as ranks have together."""
    alone = Stream(num_batches * BATCH_SIZE, num_floats, compressed=compressed)
    raw = DataLoader(alone, batch_size=BATCH_SIZE, num_workers=workers // 2, persistent_workers=workers > 0)
    stream = Stream(2 * num_batches * BATCH_SIZE, num_floats, compressed=compressed)

    def loader() -> DataLoader[Any]:
        return DataLoader(stream, batch_size=BATCH_SIZE, num_workers=workers, persistent_workers=workers > 0)

    loaders = contestants(raw, loader)
    if workers:
        return loaders
    return {**loaders, "raw DataLoader, what rank 0 reads": DataLoader(stream, batch_size=2 * BATCH_SIZE)}


def measure(arguments: argparse.Namespace) -> None:
    """Time the loaders. Called on both ranks."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    cases = {
        "Map-style, shuffled, batches of 2 kB": (map_style(1000), 1000),
        "Iterable, read by rank 0, batches of 2 kB": (dispatched(200, 16), 200),
        "Iterable, read by rank 0, batches of 1 MB": (dispatched(50, 8192), 50),
        "Iterable, read by 2 workers in all, batches of 1 MB": (dispatched(50, 8192, workers=2), 50),
        "Iterable, inflated by 2 workers in all, batches of 1 MB": (
            dispatched(50, 8192, workers=2, compressed=True),
            50,
        ),
    }
    tables: list[Table] = []
    for title, (loaders, num_batches) in cases.items():
        turns = {name: timed(loader, num_batches) for name, loader in loaders.items()}
        tables.append(Table(title=title, unit="us", measured=take_turns(turns, rounds=arguments.rounds)))
    if dist.get_rank() == 0:
        report("loader", tables, arguments)
    dist.destroy_process_group()


if __name__ == "__main__":
    on_two_ranks(__doc__, measure, rounds=15)
