"""The common cases, and models that come as a whole."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from dispatch.models import WIDTH, Coder
from drivetrain_dispatch.errors import DeviceMapError, OffloadedError
from drivetrain_dispatch.offload.cpu_offload import cpu_offload, cpu_offload_with_hook, disk_offload


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))


def test_the_host_computes_what_is_offloaded_to_it(tmp_path: Path) -> None:
    plain, x = model(), torch.randn(2, 4)
    for offloaded in (
        cpu_offload(copy.deepcopy(plain), "cpu"),
        disk_offload(copy.deepcopy(plain), tmp_path, "cpu"),
        disk_offload(copy.deepcopy(plain), tmp_path, "cpu"),  # the same folder again
        cpu_offload_with_hook(copy.deepcopy(plain), "cpu")[0],
    ):
        assert torch.equal(offloaded(x), plain(x))
    assert len(list(tmp_path.iterdir())) == 2


def test_a_model_that_comes_sends_away_the_one_before() -> None:
    first, hook = cpu_offload_with_hook(model(), "meta")  # a device that shows who is where
    second, other = cpu_offload_with_hook(model(), "cpu", hook)
    first(torch.ones(1, 4))
    assert first[0].weight.is_meta
    first.to_empty(device="cpu")  # what was on the meta device has no values to come back
    second(torch.ones(1, 4))
    assert not first[0].weight.is_meta
    first.requires_grad_(False).apply(lambda module: [value.zero_() for value in module.parameters(False)])
    hook.remove()
    other.remove()
    assert torch.equal(first(torch.ones(1, 4)), first(torch.ones(1, 4)))
    assert not first[0].weight.is_meta


@pytest.mark.parametrize("method", ["encode", "decode"])
def test_a_model_comes_when_a_method_computes_with_it(method: str) -> None:
    first, hook = cpu_offload_with_hook(Coder(), "meta")
    second, other = cpu_offload_with_hook(Coder(), "meta", hook)
    first.to_empty(device="cpu")
    assert getattr(first, method)(torch.ones(1, WIDTH)).is_meta
    first.to_empty(device="cpu")
    hook.remove()
    assert not getattr(first, method)(torch.ones(1, WIDTH)).is_meta
    other.remove()
    assert not getattr(second, method)(torch.ones(1, WIDTH)).is_meta
    assert second.__dict__.keys() == first.__dict__.keys() == Coder().__dict__.keys()


def test_a_model_that_comes_and_goes_is_not_copied() -> None:
    first, hook = cpu_offload_with_hook(model(), "cpu")
    with pytest.raises(OffloadedError, match=r"remove\(\) of its OffloadHook, first"):
        copy.deepcopy(first)
    hook.remove()
    assert torch.equal(copy.deepcopy(first)[0].weight, first[0].weight)


def test_the_disk_does_not_compute() -> None:
    with pytest.raises(DeviceMapError, match="does not compute"):
        cpu_offload_with_hook(model(), "disk")
    with pytest.raises(DeviceMapError, match="does not compute"):
        cpu_offload(model(), "disk")


def test_what_cannot_come_and_go_as_a_whole_is_said() -> None:
    first, hook = cpu_offload_with_hook(model(), "cpu")
    with pytest.raises(OffloadedError, match=r"has an OffloadHook already: call remove\(\)"):
        cpu_offload_with_hook(first, "cpu")
    hook.remove()
    hook.remove()
    again, _ = cpu_offload_with_hook(first, "cpu")
    with pytest.raises(OffloadedError, match="has an OffloadHook already"):
        cpu_offload_with_hook(nn.Sequential(again), "cpu")
    with pytest.raises(
        ValueError, match="prev_module_hook is a tuple: give the OffloadHook of the model before, the second"
    ):
        cpu_offload_with_hook(model(), "cpu", (first, hook))
    with pytest.raises(
        DeviceMapError, match=r"'0\.weight' and 3 more on the meta device: load weights first"
    ):
        cpu_offload_with_hook(model().to("meta"), "cpu")
    with pytest.raises(OffloadedError, match="dispatched already"):
        cpu_offload_with_hook(cpu_offload(model(), "cpu"), "cpu")
