"""Batches on their way to the device."""

from typing import Any

import pytest
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator
from hardware.devices import OnDevice, here, runs_on_device

pytestmark = pytest.mark.as_tpu


@pytest.mark.parametrize("copy_ahead", [0, 1, 3])
@pytest.mark.parametrize("pin_memory", [True, False])
@pytest.mark.default_cases("True-1", "False-3")
@runs_on_device(1, 2)
def test_a_batch_is_there_when_the_loop_has_it_and_the_host_waits_for_none(
    pin_memory: bool, copy_ahead: int
) -> None:
    accelerator = Accelerator(data={"copy_ahead": copy_ahead})
    data = TensorDataset(torch.arange(24.0)[:, None], torch.arange(24))
    loader = accelerator.prepare(DataLoader(data, batch_size=4, pin_memory=pin_memory))
    with here().copies() as copies, here().waits() as found:
        got = [(x * 2, y + 1) for x, y in loader]
    assert found == [] or not here().copies_aside
    assert all(x.device == accelerator.device for x, _ in got)
    rank, count = accelerator.process_index, accelerator.num_processes
    mine = torch.arange(24.0).view(-1, 4)[rank::count] if count > 1 else torch.arange(24.0).view(-1, 4)
    assert torch.equal(torch.cat([x for x, _ in got]).cpu().flatten(), 2 * mine.flatten())
    assert torch.equal(torch.cat([y for _, y in got]).cpu(), mine.flatten().long() + 1)
    ahead = copy_ahead if here().copies_aside else 0
    assert copies.beside == (2 * len(got) if pin_memory and ahead else 0)
    assert copies.kept == (2 * len(got) if ahead else 0)
    accelerator.end_training()


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.default_cases
@runs_on_device(1, 2)
def test_nested_batches_are_copied_ahead_leaf_by_leaf(num_workers: int) -> None:
    """Read two epochs of nested batches, with workers that stay, if any."""
    accelerator = Accelerator(data={"copy_ahead": 2}, sections={"run": {"show_plan": False}})
    samples: Any = [
        {"x": torch.full((3,), float(i)), "y": {"number": i, "pair": (torch.tensor(i), torch.tensor(-i))}}
        for i in range(24)
    ]
    given = DataLoader(
        samples, batch_size=4, pin_memory=True, num_workers=num_workers, persistent_workers=num_workers > 0
    )
    loader = accelerator.prepare(given)
    mine = torch.arange(24).view(-1, 4)[accelerator.process_index :: accelerator.num_processes].flatten()
    for _ in range(2):
        with here().copies() as copies, here().waits() as found:
            got = [
                (batch["x"] * 2, batch["y"]["number"] + 0, *(each + 0 for each in batch["y"]["pair"]))
                for batch in loader
            ]
        assert found == [] or not here().copies_aside
        columns = [torch.cat(column).cpu() for column in zip(*got, strict=True)]
        assert all(value.device == accelerator.device for batch in got for value in batch)
        assert torch.equal(columns[0], 2.0 * mine[:, None].expand(-1, 3))
        assert torch.equal(torch.stack(columns[1:]), torch.stack([mine, mine, -mine]))
        num_beside = 4 * len(got) if here().copies_aside else 0
        assert (copies.beside, copies.kept) == (num_beside, num_beside)
    accelerator.end_training()


def copies_while_it_computes() -> int:
    """Compute long on small batches of large samples; how many of their copies ran beside a kernel."""
    from hardware.cuda_device import kineto_events

    accelerator = Accelerator(data={"copy_ahead": 2}, sections={"run": {"show_plan": False}})
    samples = TensorDataset(torch.ones(24, 2**20))
    loader = accelerator.prepare(DataLoader(samples, batch_size=4, pin_memory=True))
    square = torch.randn(4096, 4096, device=accelerator.device)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        for (x,) in loader:
            x.sum()
            for _ in range(8):  # tens of milliseconds, in which the host collates and copies the next ones
                square @ square
        torch.cuda.synchronize()
    accelerator.end_training()
    events = [
        (each.name(), each.device_resource_id(), each.start_ns(), each.start_ns() + each.duration_ns())
        for each in kineto_events(trace)
        if each.device_type() == DeviceType.CUDA
    ]
    kernels = [each[1:] for each in events if not each[0].startswith(("Memcpy", "Memset"))]
    copies = [each[1:] for each in events if each[0].startswith("Memcpy HtoD (Pinned")]
    assert len(copies) == len(loader)
    return sum(
        any(stream != of_kernel and start < end and begin < stop for of_kernel, begin, end in kernels)
        for stream, start, stop in copies
    )


@pytest.mark.only_on("cuda", why="the simulated device computes in the host's own time")
def test_copies_run_while_the_device_computes(on_device: OnDevice) -> None:
    (num_beside,) = on_device(copies_while_it_computes)
    assert num_beside >= 2
