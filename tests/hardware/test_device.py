"""The device itself: it shows the mistakes that other tests look for, is detected, and is connected."""

import logging

import pytest
import torch
import torch.distributed as dist

from drivetrain_config import environ
from drivetrain_state import DeviceError, connect, detect_devices
from hardware.devices import OnDevice, first, here, runs_on_device


@pytest.mark.only_on(
    "simulated", why="a card computes with what memory held before, which may be right by chance"
)
@runs_on_device()
def test_it_shows_whoever_does_not_wait_and_whoever_does() -> None:
    place = torch.device(first())
    pinned = torch.ones(4).pin_memory()
    with torch.Stream(place) as stream:
        early = pinned.to(place, non_blocking=True)
    assert early.cpu().isnan().all()  # a batch that nobody waited for
    torch.accelerator.current_stream().wait_stream(stream)
    assert early.cpu().eq(1).all()

    copy = torch.empty(4, pin_memory=True)
    copy.copy_(early, non_blocking=True)
    assert copy.isnan().all()  # a checkpoint that is written too soon
    torch.accelerator.synchronize()
    assert copy.eq(1).all()

    with here().waits() as found:
        early.mul_(2).add_(1)
        torch.full((), 3.0, device=place)
        pinned.to(place, non_blocking=True)
        assert found == []
        early.sum().item()
        torch.tensor(3.0, device=place)
        early[early > 0]
    whats = [each.partition(" < ")[0] for each in found]
    assert whats == ["aten::_local_scalar_dense", "a copy from the host", "aten::nonzero", "aten::index"]
    assert "test_it_shows_whoever_does_not_wait" in found[0]


def adopts_gloo() -> str:
    """Adopt a group that moves the device's tensors by gloo; what is logged."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("drivetrain_state").addHandler(handler)
    dist.init_process_group(f"cpu:gloo,{here().name}:gloo", store=dist.HashStore(), rank=0, world_size=1)
    with connect(device=here().name) as context:
        assert not context.owns_group
        assert context.device == torch.device(first())
    logging.getLogger("drivetrain_state").removeHandler(handler)
    dist.destroy_process_group()
    (line,) = said
    return line


def test_a_group_that_copies_through_the_host_is_adopted_with_a_warning(on_device: OnDevice) -> None:
    (line,) = on_device(adopts_gloo)
    assert "tensors through gloo, which copies them through host memory: for " in str(line)


@runs_on_device()
def test_a_device_tells_its_name_and_memory() -> None:
    found = detect_devices()[0]
    assert len(found.names) == found.count == here().num_devices()
    assert found.ability.fp16
    if here().name == "cuda":
        assert all(size > 2**30 for size in found.memory_bytes)
        assert len(found.memory_bytes) == found.count


@runs_on_device()
def test_more_processes_than_devices_is_an_error_with_the_count() -> None:
    count = here().num_devices()
    variables = {
        **{name: str(count) for name in ("RANK", "LOCAL_RANK")},
        **{name: str(count + 1) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")},
    }
    with (
        environ.exported(**variables),
        pytest.raises(DeviceError, match=f"this process sees {count} {here().name} device"),
    ):
        connect(device=here().name)
