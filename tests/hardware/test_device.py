"""The device itself shows the mistakes that the tests beside this one look for."""

from collections.abc import Callable

import pytest
import torch

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
