"""Time and memory from `load_state` to the first batch, at 90 % of an epoch of 1, 20 and 1000 million samples.

    uv run --group bench python benchmarks/resume.py

A resume happens in a fresh process, so each measurement has one of its own. The dataset is map-style and shuffled;
a sample costs nothing, so that what is seen is the loader's. Accelerate goes on as its documentation says, with
`skip_first_batches`; of 1000 million samples its sampler would make a Python list, and it is left out.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rounds import RESULTS, Table, installed, report
from torch.utils.data import DataLoader, Dataset

MILLIONS = (1, 20, 1000)
PEER_MILLIONS = 20  # the most that Accelerate is asked for
BATCH_SIZE = 32


class Numbers(Dataset[int]):
    """Sample i is i."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


def start(library: str, length: int) -> tuple[Any, Any, Callable[..., Any]]:
    """An Accelerator of a library, a prepared loader, and the library's `skip_first_batches`."""
    if library == "drivetrain":
        from drivetrain import Accelerator, skip_first_batches
    else:
        from accelerate import Accelerator, skip_first_batches
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(Numbers(length), batch_size=BATCH_SIZE, shuffle=True))
    return accelerator, loader, skip_first_batches


def save(library: str, length: int, folder: Path) -> None:
    """Save a run of one library at 90 % of an epoch."""
    accelerator, loader, skip_first_batches = start(library, length)
    if library == "drivetrain":
        next(iter(skip_first_batches(loader, read_batches(length) - 1)))
    accelerator.save_state(folder)


def first_batch(library: str, length: int, folder: Path | None) -> Mapping[str, float]:
    """Seconds to the first batch of a fresh epoch, or of the rest of a saved one; and the peak of bytes it took."""
    from drivetrain_memory import record_peak

    accelerator, loader, skip_first_batches = start(library, length)
    with record_peak() as memory:
        began = time.perf_counter()
        if folder is not None:
            accelerator.load_state(folder)
            if library != "drivetrain":
                loader = skip_first_batches(loader, read_batches(length))
        next(iter(loader))
        seconds = time.perf_counter() - began
    return {"seconds": seconds, "bytes": memory.host_bytes - memory.host_before_bytes}


def read_batches(length: int) -> int:
    """The batches read before the run was stopped."""
    return length // BATCH_SIZE * 9 // 10


def in_a_process_of_its_own(task: str, library: str, millions: int, folder: Path) -> dict[str, float]:
    """Run a task in a fresh process."""
    words = [sys.executable, __file__, "--task", task, library, str(millions), str(folder)]
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1]) if task != "save" else {}


def measure(rounds: int, sizes: tuple[int, ...], folder: Path) -> list[Table]:
    """Two tables a size, of seconds and of bytes."""
    libraries = ["drivetrain", *(["Accelerate"] if installed("accelerate") else [])]
    tables: list[Table] = []
    for millions in sizes:
        contestants: dict[str, tuple[str, str, Path]] = {}
        for library in libraries:
            if library != "drivetrain" and millions > PEER_MILLIONS:
                continue
            saved = folder / f"{library}-{millions}"
            in_a_process_of_its_own("save", library, millions, saved)
            contestants[f"{library}, fresh"] = ("fresh", library, saved)
            contestants[f"{library}, resumed"] = ("resume", library, saved)
        found: dict[str, list[dict[str, float]]] = {name: [] for name in contestants}
        for number in range(rounds):
            names = list(contestants)
            for name in names[number % len(names) :] + names[: number % len(names)]:
                task, library, saved = contestants[name]
                found[name].append(in_a_process_of_its_own(task, library, millions, saved))
        for what, unit in (("seconds", "ms"), ("bytes", "MB")):
            measured = {name: [one[what] for one in taken] for name, taken in found.items()}
            title = (
                f"{millions} million samples, {'time to the first batch' if unit == 'ms' else 'peak memory'}"
            )
            tables.append(Table(title=title, unit=unit, measured=measured))
    return tables


def main() -> None:
    """Measure every size, or run one task of a measurement."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="rounds, of which all count")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder the table is written to")
    parser.add_argument("--millions", type=int, nargs="+", default=MILLIONS, help="sizes of the dataset")
    parser.add_argument("--task", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.task is None:
        with tempfile.TemporaryDirectory() as folder:
            report("resume", measure(arguments.rounds, tuple(arguments.millions), Path(folder)), arguments)
        return
    task, library, millions, folder = arguments.task
    length = int(millions) * 1_000_000
    if task == "save":
        save(library, length, Path(folder))
    else:
        print(json.dumps(first_batch(library, length, Path(folder) if task == "resume" else None)))


if __name__ == "__main__":
    main()
