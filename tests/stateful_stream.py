"""A stream that knows where it stands."""

from collections.abc import Iterator

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info


class Standing(IterableDataset[torch.Tensor]):
    """The numbers up to `length` with a draw each, shared out among workers; it notes which were asked of it."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.number = 0
        self.asked: list[int] = []

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        worker, num_workers = (info.id, info.num_workers) if info else (0, 1)
        while self.number * num_workers + worker < self.length:
            index = self.number * num_workers + worker
            self.number += 1
            self.asked.append(index)
            noise = torch.rand(()).item() + float(np.random.rand())
            yield torch.tensor([index, noise], dtype=torch.float64)
        self.number = 0

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.number = state["number"]
