"""Loops that leak, each in its own way, and one that does not; `python planted_leaks.py NAME` watches one."""

import ctypes
import functools
import gc
import json
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from drivetrain_memory import LeakDetector

Step = Callable[[int], object]
CACHE: dict[object, object] = {}


class Rows(Dataset[torch.Tensor]):
    """A dataset that keeps a copy of what it has read, in the worker."""

    def __init__(self, *, keeps: bool) -> None:
        self.keeps = keeps
        self.seen: list[bytearray] = []

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.keeps:
            self.seen.append(bytearray(100_000))
        return torch.full((8,), float(index))


def training() -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], torch.Tensor]]:
    model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 1))
    optimizer = torch.optim.Adam(model.parameters())

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.randn(32, 32)).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return model, optimizer, step


def clean() -> Iterator[None]:
    history: list[float] = []
    _, _, train = training()
    while True:
        history.append(train().item())
        yield


def list_of_losses() -> Iterator[None]:
    model, _, train = training()
    losses = []
    while True:
        train()
        losses.append(model(torch.randn(32, 32)).mean())
        yield


def cache_keyed_by_tensor() -> Iterator[None]:
    model, _, train = training()
    while True:
        train()
        key = torch.randn(1000)
        CACHE[key] = model(key[:32])
        yield


def closure() -> Iterator[None]:
    _, _, train = training()
    callbacks = []
    while True:
        train()
        batch = torch.randn(1000)
        callbacks.append(lambda batch=batch: batch.sum())
        yield


def hooks_never_removed() -> Iterator[None]:
    model, _, train = training()
    while True:
        seen: list[torch.Tensor] = []
        model.register_forward_hook(lambda module, args, output, seen=seen: seen.append(output.detach()))
        train()
        yield


def worker_grows() -> Iterator[None]:
    loader = DataLoader(Rows(keeps=True), batch_size=4, num_workers=1)
    _, _, train = training()
    for _ in loader:
        train()
        yield


class Meter:
    def __init__(self) -> None:
        self.total: Any = 0.0


def metric_not_detached() -> Iterator[None]:
    meter = Meter()
    model, _, train = training()
    while True:
        train()
        meter.total = meter.total + model(torch.randn(32, 32)).mean()
        yield


def native_memory() -> Iterator[None]:
    library = ctypes.CDLL(None)
    library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    _, _, train = training()
    while True:
        train()
        library.malloc(20_000)
        yield


def growing_buffer() -> Iterator[None]:
    model, _, train = training()
    model.register_buffer("history", torch.zeros(0))
    while True:
        train()
        model.history = torch.cat([model.history, torch.randn(4000)])
        yield


def parameter_groups() -> Iterator[None]:
    _, optimizer, train = training()
    while True:
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1000))]})
        train()
        yield


def running_loss() -> Iterator[None]:
    running = torch.zeros(())
    model, _, train = training()
    while True:
        train()
        running = running + model(torch.randn(32, 32)).mean()
        yield


def thread_keeps_results() -> Iterator[None]:
    go, done = threading.Semaphore(0), threading.Semaphore(0)

    def collect() -> None:
        results = []
        while True:
            go.acquire()
            results.append(torch.randn(5000))
            done.release()

    threading.Thread(target=collect, name="collector", daemon=True).start()
    _, _, train = training()
    while True:
        train()
        go.release()
        done.acquire()
        yield


def cached_function() -> Iterator[None]:
    @functools.cache
    def embed(index: int) -> torch.Tensor:
        return torch.full((2000,), float(index))

    _, _, train = training()
    index = 0
    while True:
        train()
        embed(index)
        index += 1
        yield


class Node:
    def __init__(self) -> None:
        self.itself, self.tensor = self, torch.zeros(5000)


def cycles() -> Iterator[None]:
    _, _, train = training()
    gc.disable()  # else a collection falls into the loop
    while True:
        train()
        Node()
        yield


def watch(name: str) -> dict[str, Any]:
    detector = LeakDetector(on_leak=lambda report: None)
    steps = globals()[name]()
    for _ in range(34 if name != "worker_grows" else 50):
        next(steps)
        detector.step()
    if name == "cycles":
        detector.close()
        detector.investigate()
    for _ in range(60):
        if detector.report is not None:
            break
        next(steps)
        detector.step()
    report = detector.report
    return {
        "leaks": []
        if report is None
        else [
            {
                "kind": one.kind,
                "holder": one.holder,
                "rate": one.bytes_per_step,
                "line": one.line,
                "per_step": dict(one.per_step),
            }
            for one in report.leaks
        ],
        "cycles": [] if report is None else [str(one) for one in report.cycles],
        "growth": {key: (round(one.rate), one.goes_on) for key, one in detector.growth.items()},
        "text": str(report),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps([watch(name) for name in sys.argv[1:]]))
