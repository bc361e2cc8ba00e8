"""A program that trains a small classifier and counts its right answers; `--raw` does the same with torch alone.

It prints the seconds of a step of an epoch, and those of a batch of its evaluation; on one process CPU seconds, which
what else the machine does hardly changes.
"""

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FEATURES, CLASSES, BATCH_SIZE = 32, 10, 16

Epoch = Callable[[], tuple[int, int]]


def parts(steps: int, processes: int) -> tuple[nn.Module, torch.optim.Optimizer, TensorDataset]:
    """A model, what trains it, and data for some steps of each process; the last batch is not full."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, CLASSES))
    inputs = torch.randn(steps * BATCH_SIZE * processes - 3, FEATURES)
    data = TensorDataset(inputs, inputs[:, :CLASSES].argmax(1))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3), data


def accelerated(steps: int) -> tuple[Epoch, Epoch]:
    """The training epoch and the evaluation, in Accelerate's words."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer, data = parts(steps, accelerator.num_processes)
    train = DataLoader(data, batch_size=BATCH_SIZE, shuffle=True)
    test = DataLoader(data, batch_size=BATCH_SIZE)
    model, optimizer, train, test = accelerator.prepare(model, optimizer, train, test)

    def epoch() -> tuple[int, int]:
        model.train()
        for inputs, targets in train:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.cross_entropy(model(inputs), targets))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        return 0, 0

    def evaluation() -> tuple[int, int]:
        right = seen = 0
        model.eval()
        for inputs, targets in test:
            with torch.no_grad():
                answers = model(inputs).argmax(1)
            answers, targets = accelerator.gather_for_metrics((answers, targets))
            right += int((answers == targets).sum())
            seen += len(targets)
        return right, seen

    return epoch, evaluation


def raw(steps: int) -> tuple[Epoch, Epoch]:
    """The same with torch alone, as its documentation writes it."""
    processes = 1
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
        processes = dist.get_world_size()
    model, optimizer, data = parts(steps, processes)
    module: Any = nn.parallel.DistributedDataParallel(model) if processes > 1 else model
    order = DistributedSampler(data) if processes > 1 else None
    train = DataLoader(data, batch_size=BATCH_SIZE, shuffle=order is None, sampler=order)
    rows = DistributedSampler(data, shuffle=False) if processes > 1 else None
    test = DataLoader(data, batch_size=BATCH_SIZE, sampler=rows)

    def epoch() -> tuple[int, int]:
        module.train()
        for number, (inputs, targets) in enumerate(train):
            closes = number % 2 == 1 or number + 1 == len(train)
            if processes > 1:
                module.require_backward_grad_sync = closes
            (nn.functional.cross_entropy(module(inputs), targets) / 2).backward()
            if closes:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        return 0, 0

    def evaluation() -> tuple[int, int]:
        right = seen = 0
        module.eval()
        for inputs, targets in test:
            with torch.no_grad():
                answers = module(inputs).argmax(1)
            if processes > 1:  # the few repeats of the last batch are counted, which costs nothing
                answers, targets = gathered(answers, processes), gathered(targets, processes)
            right += int((answers == targets).sum())
            seen += len(targets)
        return right, seen

    return epoch, evaluation


def gathered(rows: Tensor, processes: int) -> Tensor:
    """All processes' rows, equally many from each."""
    parts = [torch.empty_like(rows) for _ in range(processes)]
    dist.all_gather(parts, rows)
    return torch.cat(parts)


def main() -> None:
    """Run one epoch that does not count and one that does, and print the seconds of a step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--raw", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    epoch, evaluation = (raw if options.raw else accelerated)(options.steps)
    epoch()
    evaluation()
    now = time.perf_counter if dist.is_initialized() else time.process_time
    began = now()
    epoch()
    trained = now()
    evaluation()
    ended = now()
    if not dist.is_initialized() or dist.get_rank() == 0:
        found = {"step": (trained - began) / options.steps, "evaluation": (ended - trained) / options.steps}
        print("FOUND", json.dumps(found))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
