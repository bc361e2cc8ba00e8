"""Optimizers with states in few bits, and steps in the host's memory, on a device."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain import Accelerator
from drivetrain_backends import OptimizerStateError
from hardware.devices import OnDevice, here


class AsCuda(str):
    """The device's name, which torchao takes for one of the two that it lists."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return other == "cuda" or str.__eq__(self, other)


@contextmanager
def as_cuda() -> Iterator[Any]:
    """CPUOffloadOptimizer on this device: it needs streams, and asserts a name."""
    from torchao.optim import cpu_offload

    before = cpu_offload.get_available_devices
    cpu_offload.get_available_devices = lambda: ["cpu", AsCuda(here().name)]
    try:
        yield cpu_offload.CPUOffloadOptimizer
    finally:
        cpu_offload.get_available_devices = before


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 8))


def trained(folder: Path, kind: Any, begin: int, end: int, **options: Any) -> dict[str, torch.Tensor]:
    """Train with clipped gradients over windows of two micro-batches, and save."""
    sections = {"run": {"show_plan": False}, **options.pop("more", {})}
    settings = {"gradient_accumulation_steps": 2, "sections": sections, **options}
    with torch.compiler.set_stance("force_eager"), Accelerator(project_dir=folder, **settings) as accelerator:
        model = net()
        model, optimizer = accelerator.prepare(model, kind(model.parameters()))
        if begin:
            assert accelerator.load_state() == begin
        for step in range(begin, end):
            batch = torch.randn(8, 64, generator=torch.Generator().manual_seed(step))
            for part in batch.to(accelerator.device).chunk(2):
                with accelerator.accumulate(model):
                    accelerator.backward(model(part).square().mean())
                    accelerator.clip_grad_norm_(model.parameters(), 0.1)
                    optimizer.step()
                    optimizer.zero_grad()
        accelerator.save_state()
        state = accelerator.get_state_dict(model, everywhere=True)
        return {name: value.cpu().clone() for name, value in state.items()}


def refused(folder: Path) -> None:
    with as_cuda() as kind:

        def offloaded(parameters: Any) -> torch.optim.Optimizer:
            return kind(list(parameters), torch.optim.AdamW, lr=0.01, fused=False)

        for backend in ("single", "ddp", "fsdp"):
            with pytest.raises(
                OptimizerStateError, match=r"CPUOffloadOptimizer steps copies .*fsdp.offload=True"
            ):
                trained(folder, offloaded, 0, 1, backend=backend)


@pytest.mark.only_on("simulated", why="torchao's own check of the device's name is passed by for it")
def test_steps_in_host_memory_are_refused_by_name_and_what_to_use_is_said(
    on_device: OnDevice, tmp_path: Path
) -> None:
    pytest.importorskip("torchao")
    on_device(refused, tmp_path, num_processes=1)


def offloaded_by_fsdp(folder: Path) -> None:
    """What is to be used: states in 8 bits in host memory, as on the device."""
    from torchao.optim import AdamW8bit

    expected = trained(folder / "device", AdamW8bit, 0, 4, backend="fsdp")
    for begin, end in ((0, 3), (3, 4)):
        offload = {"fsdp": {"offload": True}}
        found = trained(folder / "host", AdamW8bit, begin, end, backend="fsdp", more=offload)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-5)


@pytest.mark.default_cases
def test_fsdp_keeps_states_in_8_bits_in_host_memory(on_device: OnDevice, tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    on_device(offloaded_by_fsdp, tmp_path, num_processes=2)


def eight_bits(folder: Path, backend: str) -> None:
    from torchao.optim import AdamW8bit

    expected = trained(folder / "whole", AdamW8bit, 0, 4, backend=backend)
    trained(folder / "parts", AdamW8bit, 0, 3, backend=backend)
    found = trained(folder / "parts", AdamW8bit, 3, 4, backend=backend)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.default_cases
def test_states_in_8_bits_go_on_bit_for_bit_on_a_device(on_device: OnDevice, tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    on_device(eight_bits, tmp_path, "single")
    on_device(eight_bits, tmp_path / "fsdp", "fsdp", num_processes=2)
