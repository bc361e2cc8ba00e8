"""A program that saves a model with its AdamW by `save_state` and loads it by `load_state`: seconds, and bytes.

A save counts until it returns, and until its files are on the disk. A load counts at once, where the system may still
hold the files in memory, and from the disk, as for a run that goes on later.
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

from accelerate import Accelerator


def have_on_disk(folder: str, *, forget: bool = False) -> None:
    """Wait until the files below a folder are on the disk; `forget` them, so that the next read comes from there."""
    for path in Path(folder).rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                if forget:  # Linux alone can be asked to
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> None:
    """Take one step, save, load twice, and print what they took."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--millions", type=int, default=50)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    layers = [nn.Linear(1000, 1000) for _ in range(options.millions)]
    model: nn.Module = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(model(torch.randn(2, 1000)).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        began = time.perf_counter()
        accelerator.save_state(folder)
        saved = time.perf_counter()
        have_on_disk(folder)
        on_disk = time.perf_counter()
        accelerator.load_state(folder)
        loaded = time.perf_counter()
        have_on_disk(folder, forget=True)
        began_again = time.perf_counter()
        accelerator.load_state(folder)
        loaded_again = time.perf_counter()
        size = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
    found = {
        "save": saved - began,
        "save to disk": on_disk - began,
        "load": loaded - on_disk,
        "load from disk": loaded_again - began_again,
        "bytes": size,
    }
    print("FOUND", json.dumps(found))
    accelerator.end_training()


if __name__ == "__main__":
    main()
