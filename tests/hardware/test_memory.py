"""The device's memory: its peak is measured, and batches that do not fit are found."""

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from drivetrain_memory import (
    LeakDetector,
    MemoryTracker,
    find_executable_batch_size,
    free_memory,
    memory_breakdown,
    record_peak,
)
from hardware.devices import first, here

MB = 2**20


def measures() -> None:
    place = torch.device(first())
    with record_peak() as memory:
        before = memory.device_before_bytes
        assert before is not None
        block = torch.ones(3 * MB, dtype=torch.uint8, device=place)
        del block
        with record_peak() as inner:
            torch.ones(MB, dtype=torch.uint8, device=place)
        assert inner.device_bytes is not None
        assert MB <= inner.device_bytes - before < 2 * MB
    assert memory.device_bytes is not None
    assert 3 * MB <= memory.device_bytes - before < 4 * MB
    assert memory.device_reserved_bytes is not None
    assert memory.device_reserved_bytes >= memory.device_bytes


def tracks() -> None:
    place = torch.device(first())
    name = f"{here().name}:0"
    model = nn.Linear(512, 512, bias=False).to(place)
    with here().waits() as waits, MemoryTracker(None, interval_seconds=0.01) as tracker:
        with tracker.phase("forward") as peak:
            block = torch.ones(3 * MB, dtype=torch.uint8, device=place)
            del block
        metrics = tracker.as_metrics()
        found = tracker.record_breakdown(model)
    assert waits == []
    assert metrics[f"memory/{name}/allocated_bytes"] >= MB
    (of_device, *_) = peak.devices
    assert of_device.device == name
    assert 3 * MB <= of_device.peak_bytes - of_device.before_bytes < 4 * MB
    summary = tracker.summary()
    assert summary.phases["forward"].device_peak_bytes == sum(one.peak_bytes for one in peak.devices)
    assert summary.device_peaks[name] >= of_device.peak_bytes
    assert found.by_device[name]["parameters"] == 4 * 512 * 512
    assert found.by_device[name]["rest"] >= 0
    beside = torch.ones(2 * MB, dtype=torch.uint8, device=place)
    assert memory_breakdown(model).by_device[name]["rest"] >= found.by_device[name]["rest"] + 2 * MB
    del beside


def train_once(batch_size: int) -> None:
    """Take batch_size x scale x 0.5 MB for a forward, beside 8 MB for weights and their gradients."""
    model = nn.Linear(1024, 1024).to(first())
    model(torch.ones(batch_size * 64 * here().scale, 1024, device=first())).sum().backward()


def searches() -> None:
    train_once(1)  # what libraries keep for good is there
    gc.collect()
    before = here().bytes_in_use()
    tried: list[int] = []

    @find_executable_batch_size(starting_batch_size=64)
    def train(batch_size: int) -> int:
        tried.append(batch_size)
        assert here().bytes_in_use() == before  # nothing is left of the try before
        train_once(batch_size)
        return batch_size

    with here().limited(18 * here().scale * MB):
        assert train() == 16
    assert tried == [64, 32, 16]
    free_memory()
    assert here().bytes_in_use() == before


def leaks_pinned_memory() -> list[tuple[str, str | None, str | None]]:
    """Train with batches that are copied from pinned memory, of which a list keeps each one; return the findings."""
    place = torch.device(first())
    model = nn.Linear(256, 256).to(place)
    kept: list[torch.Tensor] = []
    detector = LeakDetector(on_leak=lambda report: None)
    for _ in range(100):
        batch = torch.randn(64, 256).pin_memory()
        kept.append(batch)
        model(batch.to(place, non_blocking=True)).sum().backward()
        detector.step()
        if detector.report is not None:
            break
    assert all(batch.is_pinned() for batch in kept)
    return [] if detector.report is None else [(o.kind, o.holder, o.line) for o in detector.report.leaks]


def test_peaks_are_those_of_the_device(on_device: Callable[..., list[object]]) -> None:
    on_device(measures)


def test_a_batch_size_that_fits_is_found_and_nothing_is_left_of_the_others(
    on_device: Callable[..., list[object]],
) -> None:
    on_device(searches)


def test_a_tracker_sees_the_device_without_waiting_for_it(
    on_device: Callable[..., list[object]],
) -> None:
    on_device(tracks)


def test_pinned_buffers_that_are_kept_are_named(on_device: Callable[..., list[Any]]) -> None:
    (found,) = on_device(leaks_pinned_memory)
    ((kind, holder, line),) = found
    assert (kind, holder) == ("objects", "kept (local of leaks_pinned_memory)")
    assert line.endswith("batch = torch.randn(64, 256).pin_memory()")
