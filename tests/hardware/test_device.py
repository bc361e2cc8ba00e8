"""The device itself shows the mistakes that the tests beside this one look for."""

import logging
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from drivetrain_state import connect
from hardware.devices import first, here


def shows_mistakes() -> None:
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
    assert "shows_mistakes" in found[0]


@pytest.mark.only_on(
    "simulated", why="a card computes with what memory held before, which may be right by chance"
)
def test_it_shows_whoever_does_not_wait_and_whoever_does(
    on_device: Callable[..., list[object]],
) -> None:
    on_device(shows_mistakes)


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


def test_a_group_that_copies_through_the_host_is_adopted_with_a_warning(
    on_device: Callable[..., list[object]],
) -> None:
    (line,) = on_device(adopts_gloo)
    assert "tensors through gloo, which copies them through host memory: for " in str(line)
