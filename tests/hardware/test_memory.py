"""The device's memory: its peak is measured, and batches that do not fit are found."""

import gc
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from drivetrain_memory import (
    LeakDetector,
    MemoryTracker,
    compat,
    find_executable_batch_size,
    free_memory,
    is_out_of_memory,
    memory_breakdown,
    read_summaries,
    record_peak,
    release_memory,
    write_page,
)
from drivetrain_memory.cli.watch import WatchArguments, run
from drivetrain_memory.usage.nvml import NVIDIA
from hardware.devices import OnDevice, first, here, runs_on_device

MB = 2**20


@runs_on_device()
def test_peaks_are_those_of_the_device() -> None:
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
    with record_peak() as alone:
        train_once(1)
    of_device = alone.devices[0]
    assert of_device.device == first()
    assert of_device.peak_bytes == torch.accelerator.max_memory_allocated(0)
    assert of_device.reserved_bytes == torch.accelerator.max_memory_reserved(0)


@runs_on_device()
def test_a_tracker_sees_the_device_without_waiting_for_it() -> None:
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


@runs_on_device()
def test_a_batch_size_that_fits_is_found_and_nothing_is_left_of_the_others() -> None:
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


@pytest.mark.only_on("cuda", why="the simulated device has the host's memory")
@runs_on_device()
def test_what_exceeds_the_card_is_tried_and_all_its_bytes_come_back() -> None:
    """Try what is larger than the whole card, of which half is free, with nothing limited."""
    part = torch.cuda.get_device_properties(0).total_memory // 16
    gc.collect()
    torch.accelerator.empty_cache()
    before, reserved = here().bytes_in_use(), torch.accelerator.memory_reserved()
    tried: list[int] = []

    @find_executable_batch_size(starting_batch_size=32)
    def take(batch_size: int) -> int:
        tried.append(batch_size)
        half = torch.empty(batch_size * part // 2, dtype=torch.uint8, device=first())
        return (half.numel() + torch.empty_like(half).numel()) // part

    assert take() == 8
    assert tried == [32, 16, 8]
    free_memory()
    assert here().bytes_in_use() == before
    assert torch.accelerator.memory_reserved() <= reserved


@runs_on_device()
def test_an_error_of_the_devices_allocator_is_known() -> None:
    with (
        here().limited(4 * here().scale * MB),
        pytest.raises(torch.OutOfMemoryError, match=r"out of memory|no room") as caught,
    ):
        torch.empty(8 * here().scale * MB, dtype=torch.uint8, device=first())
    assert is_out_of_memory(caught.value)


@runs_on_device()
def test_what_is_released_is_handed_back_to_the_device() -> None:
    block = torch.zeros(16 * here().scale * MB, dtype=torch.uint8, device=first())
    size, before = block.nbytes, torch.accelerator.memory_reserved()
    (block,) = release_memory(block)
    assert torch.accelerator.memory_reserved() <= before - size


def leaks(make: Callable[[], Tensor]) -> list[tuple[str, str | None, str | None]]:
    """Train with batches of which a list keeps each one; return the findings."""
    place = torch.device(first())
    model = nn.Linear(256, 256).to(place)
    kept: list[Tensor] = []
    detector = LeakDetector(on_leak=lambda report: None)
    for _ in range(100):
        batch = make()
        kept.append(batch)
        model(batch.to(place, non_blocking=True)).sum().backward()
        detector.step()
        if detector.report is not None:
            break
    return [] if detector.report is None else [(o.kind, o.holder, o.line) for o in detector.report.leaks]


def leaks_pinned_memory() -> list[tuple[str, str | None, str | None]]:
    return leaks(lambda: torch.randn(64, 256).pin_memory())


def leaks_device_memory() -> list[tuple[str, str | None, str | None]]:
    return leaks(lambda: torch.randn(64, 256, device=first()))


@pytest.mark.only_on("cuda", why="torch records the allocations of CUDA alone")
@runs_on_device()
def test_allocations_have_stacks_and_pinned_memory_is_counted() -> None:
    held = torch.zeros(1 << 20, device="cuda"), torch.zeros(1 << 20).pin_memory()
    assert compat.host_allocator_bytes() >= 4 << 20
    assert len(held) == 2


def draws_a_page(folder: Path) -> tuple[str, dict[str, float]]:
    """The page of a run that took 3 MB of the device, and the peaks that its summary has."""
    with MemoryTracker(folder, interval_seconds=0.01) as tracker:
        block = torch.ones(3 * MB, dtype=torch.uint8, device=first())
        tracker.step()
    del block  # the last sample is taken at the end
    merged = read_summaries(folder)
    page = write_page(folder / "memory.html", merged, title="a run").read_text()
    (summary,) = merged.ranks
    return page, {name: peak.value for name, peak in summary.peaks.items()}


@runs_on_device()
def test_the_page_of_a_run_has_its_device(folder: Path) -> None:
    page, peaks = draws_a_page(folder)
    assert first() in page
    assert peaks[f"{first()}/allocated_bytes"] >= 3 * MB


def is_drawn_with_the_driver(folder: Path) -> None:
    page, peaks = draws_a_page(folder)
    assert torch.cuda.get_device_name(0) in page
    assert peaks["nvidia:0/used_bytes"] > 3 * MB
    assert peaks["nvidia:0/power_watts"] > 10
    code = run(WatchArguments(target=sys.executable, command=("-c", "pass"), out=str(folder / "watched")))
    assert code == 0
    assert torch.cuda.get_device_name(0) in (folder / "watched" / "memory.html").read_text()


def asks_the_driver() -> None:
    """Compute until the driver tells that the card was in use, which it measures over a second."""
    driver = NVIDIA.open()
    block = torch.randn(8192, 8192, device="cuda")
    reading = driver.read()[0]
    for _ in range(100):
        if reading.utilization_percent:
            break
        for _ in range(10):
            torch.mm(block, block)
        torch.accelerator.synchronize()
        reading = driver.read()[0]
    driver.close()
    total = torch.cuda.get_device_properties(0).total_memory
    assert reading.total_bytes == pytest.approx(total, rel=0.1)
    assert reading.total_bytes is not None
    assert reading.used_bytes is not None
    assert block.nbytes <= reading.used_bytes <= reading.total_bytes
    assert reading.power_watts is not None
    assert 10 < reading.power_watts < 2000
    assert reading.temperature_celsius is not None
    assert 10 < reading.temperature_celsius < 110
    assert reading.utilization_percent is not None
    assert 0 < reading.utilization_percent <= 100


@pytest.mark.parametrize("body", [leaks_pinned_memory, leaks_device_memory])
@pytest.mark.default_cases
def test_batches_that_are_kept_are_named(on_device: OnDevice, body: Callable[[], object]) -> None:
    (found,) = on_device(body)
    ((kind, holder, line),) = found
    assert (kind, holder) == ("objects", "kept (local of leaks)")
    assert line.endswith(("batch = make()", "torch.randn(64, 256).pin_memory())", "device=first()))"))


@pytest.mark.only_on("cuda", why="it asks NVIDIA's driver")
def test_the_driver_tells_power_temperature_and_use(on_device: OnDevice) -> None:
    pytest.importorskip("pynvml", reason="wants pynvml, which an extra of drivetrain-memory brings")
    on_device(asks_the_driver)


@pytest.mark.only_on("cuda", why="it asks NVIDIA's driver")
def test_the_page_of_a_run_has_what_the_driver_tells(on_device: OnDevice, tmp_path: Path) -> None:
    pytest.importorskip("pynvml", reason="wants pynvml, which an extra of drivetrain-memory brings")
    on_device(is_drawn_with_the_driver, tmp_path)
