"""Batches from a loader to the device: pageable, pinned, and beside computing, by plain torch and both libraries.

Batches are slices of memory, so that nothing but the way to the device takes time; with workers they come through
shared memory, as files' would.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from bench import Bench, Goal, Table, begin
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

SAMPLE, ITEMS, BATCHES = (3, 224, 224), 256, 24  # 38.5 MB a batch
WIDTH = 8192  # of the product that computes beside the copies
NUM_WORKERS = 4
ALONE = "computing alone"
Batches = Callable[[], Iterable[Tensor]]


class Slices(Dataset[Tensor]):
    """Samples in one tensor; batches of them are views of it.

    Args:
        data: (samples, ...).
    """

    def __init__(self, data: Tensor) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Tensor:
        return self.data[index]

    def __getitems__(self, indices: Sequence[int]) -> list[Tensor]:
        """Return the samples of a batch, which follow each other, in one."""
        return [self.data[indices[0] : indices[-1] + 1]]


def whole(samples: Sequence[Tensor]) -> Tensor:
    """Return a batch that is one already."""
    (batch,) = samples
    return batch


def by_torch(bench: Bench, loader: DataLoader[Tensor]) -> Batches:
    """Plain torch's loop."""

    def batches() -> Iterable[Tensor]:
        return (batch.to(bench.device, non_blocking=True) for batch in loader)

    return batches


def by_library(library: type[Any], bench: Bench, loader: DataLoader[Tensor]) -> Batches:
    """The loop over a prepared loader, which both libraries document."""
    prepared = library(cpu=bench.device.type == "cpu").prepare(loader)
    return lambda: prepared


def libraries(bench: Bench) -> dict[str, Callable[[DataLoader[Tensor]], Batches]]:
    """Return what makes each contestant's batches of a loader."""
    from drivetrain import Accelerator

    found: dict[str, Callable[[DataLoader[Tensor]], Batches]] = {
        "raw torch": lambda loader: by_torch(bench, loader),
        "drivetrain": lambda loader: by_library(Accelerator, bench, loader),
    }
    if bench.has("Accelerate"):
        from accelerate import Accelerator as Peer

        found["Accelerate"] = lambda loader: by_library(Peer, bench, loader)
    return found


def epoch(bench: Bench, batches: Batches, compute: Callable[[Tensor], object]) -> Callable[[], float]:
    """Return a turn: the seconds of a batch over an epoch, to its end on the device."""

    def turn() -> float:
        bench.synchronise()
        count, start = 0, time.perf_counter()
        for batch in batches():
            compute(batch)
            count += 1
        bench.synchronise()
        return (time.perf_counter() - start) / count

    return turn


def product(bench: Bench) -> Callable[[Tensor], object]:
    """Return what computes for some milliseconds on an H100, and reads the batch."""
    width = bench.sized(WIDTH, 16)
    weights = torch.ones(width, width, dtype=torch.bfloat16, device=bench.device)

    def compute(batch: Tensor) -> object:
        return [weights @ weights for _ in range(4)], batch.flatten()[0] + 1

    return compute


def main() -> None:
    """Measure each way of a loader."""
    bench = begin(__doc__ or "", rounds=9)
    sample, items, num_batches = bench.sized((SAMPLE, ITEMS, BATCHES), ((3, 8, 8), 4, 3))
    data = Slices(torch.ones(num_batches * items, *sample, dtype=torch.uint8))
    makers, computing = libraries(bench), product(bench)
    on_card, workers = bench.device.type != "cpu", bench.sized(NUM_WORKERS, 0)
    cases: list[tuple[str, bool, int, Callable[[Tensor], object]]] = [
        ("pinned", on_card, 0, lambda batch: batch),
        ("pageable", False, 0, lambda batch: batch),
        (f"pinned, {NUM_WORKERS} workers, beside computing", on_card, workers, computing),
    ]
    size_bytes = items * data.data[0].nbytes
    for title, pinned, num_workers, compute in cases:
        options: dict[str, Any] = {"pin_memory": pinned, "num_workers": num_workers, "collate_fn": whole}
        options |= {"persistent_workers": True} if num_workers else {}
        turns: dict[str, Callable[[], float]] = {}
        for name, make in makers.items():
            with bench.attempt(name, ours=name != "Accelerate"):
                batches = make(DataLoader(data, batch_size=items, **options))
                if {batch.device for batch in batches()} != {bench.device}:
                    raise ValueError(f"batches of {name} are not on {bench.device}")
                turns[name] = epoch(bench, batches, compute)
        if compute is computing:
            on_device = [torch.empty(items, *sample, dtype=torch.uint8, device=bench.device)] * num_batches
            turns[ALONE] = epoch(bench, lambda found=on_device: found, compute)
        table = Table(
            title=f"Batches of {size_bytes / 1e6:.3g} MB, {title}", unit="ms", measured={}, digits=3,
            goals=[Goal(of="drivetrain", beside="Accelerate", most=1.0)],
            rates={"GB/s": size_bytes / 1e9, "samples/s": float(items)},
        )  # fmt: skip
        bench.measure(table, turns, share=1 / len(cases))
    bench.finish()


if __name__ == "__main__":
    main()
