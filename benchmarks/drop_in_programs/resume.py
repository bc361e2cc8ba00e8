"""A program that stops at 90 % of an epoch, or goes on there: the seconds from `load_state` to the first batch."""

import argparse
import json
import time

import torch
from torch.utils.data import DataLoader, Dataset

from accelerate import Accelerator

BATCH_SIZE = 1000


class Numbers(Dataset[int]):
    """Sample i is i."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


def main() -> None:
    """Read and save, or load and read on."""
    parser = argparse.ArgumentParser()
    parser.add_argument("task", choices=["save", "resume"])
    parser.add_argument("folder")
    parser.add_argument("--millions", type=int, default=20)
    options = parser.parse_args()
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    loader = DataLoader(Numbers(options.millions * 1_000_000), batch_size=BATCH_SIZE, shuffle=True)
    loader = accelerator.prepare(loader)
    batches_read = len(loader) * 9 // 10
    if options.task == "save":
        for number, _ in enumerate(loader):
            if number + 1 == batches_read:
                accelerator.save_state(options.folder)
                break
        return
    began = time.perf_counter()
    accelerator.load_state(options.folder)
    rest = accelerator.skip_first_batches(loader, batches_read)
    next(iter(rest))
    print("FOUND", json.dumps({"resume": time.perf_counter() - began}))


if __name__ == "__main__":
    main()
