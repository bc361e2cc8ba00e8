"""Frees models, graphs, workers and compiled code in a process of its own; prints what was free, in bytes."""

import gc
import json
import sys
import weakref

import psutil
import torch
from torch import nn
from torch.utils.data import DataLoader

from drivetrain_memory import release_memory
from drivetrain_memory.leaks.measure import own_resident_bytes
from drivetrain_memory.system_heap import heap_use

MB = 2**20


def used() -> int:
    heap = heap_use()
    return own_resident_bytes() if heap is None else heap.used_bytes


def freed_by_training() -> dict[str, float]:
    before, resident = used(), own_resident_bytes()
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(8)])
    optimizer = torch.optim.Adam(model.parameters())
    loss = model(torch.randn(2048, 512)).sum()
    loss.backward()
    optimizer.step()
    graph = model(torch.randn(2048, 512)).sum()
    held = used() - before
    seen = [weakref.ref(one) for one in (model, optimizer, graph)]
    model, optimizer, loss, graph = release_memory(model, optimizer, loss, graph)
    return {
        "held": held / MB,
        "left": (used() - before) / MB,
        "resident": (own_resident_bytes() - resident) / MB,
        "alive": sum(one() is not None for one in seen),
    }


def ended_workers() -> dict[str, float]:
    loader = DataLoader(torch.arange(64), batch_size=4, num_workers=1, persistent_workers=True)
    assert len(list(loader)) == 16
    before = len(psutil.Process().children())
    (loader,) = release_memory(loader)
    return {"before": before, "after": len(psutil.Process().children())}


def freed_compiled() -> dict[str, float]:
    model = nn.Linear(512, 512)
    compiled = torch.compile(model, backend="eager")
    compiled(torch.ones(1, 512))
    seen = weakref.ref(model)
    gc.collect()
    before = used()
    model, compiled = release_memory(model, compiled)
    return {"alive": seen() is not None, "freed": (before - used()) / MB}


if __name__ == "__main__":
    torch.set_num_threads(1)
    # The first step of an optimizer imports a good part of torch, and on some processors oneDNN keeps its buffers.
    freed_by_training()
    print(json.dumps([globals()[name]() for name in sys.argv[1:]]))
