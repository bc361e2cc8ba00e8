"""A program whose main process reads an iterable dataset for all: the seconds of a batch."""

import argparse
import json
import time
from collections.abc import Iterator

import torch
from accelerate.utils import DataLoaderConfiguration
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from accelerate import Accelerator

BATCH_SIZE, LENGTH = 16, 512


class Texts(IterableDataset[dict[str, Tensor]]):
    """Texts of one length, with their masks and labels; reading one costs next to nothing."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        words = torch.arange(LENGTH)
        for _ in range(self.count):
            yield {"input_ids": words, "attention_mask": words, "labels": words}


def main() -> None:
    """Read an epoch that does not count and one that does."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--batches", type=int, default=300)
    batches = parser.parse_args().batches
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
    texts = Texts(batches * BATCH_SIZE * accelerator.num_processes)
    loader = accelerator.prepare(DataLoader(texts, batch_size=BATCH_SIZE))
    for _ in loader:
        pass
    accelerator.wait_for_everyone()
    began = time.perf_counter()
    count = sum(1 for _ in loader)
    accelerator.wait_for_everyone()
    seconds = time.perf_counter() - began
    if count != batches:
        raise RuntimeError(f"{count} batches were read instead of {batches}")
    if accelerator.is_main_process:
        print("FOUND", json.dumps({"batch": seconds / batches}))
    accelerator.end_training()


if __name__ == "__main__":
    main()
