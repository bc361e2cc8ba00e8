"""What optimizers keep, on the disk."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from dispatch.models import assert_same_weights, file_of, full_disk
from drivetrain_dispatch.errors import OffloadedError, WeightFilesError
from drivetrain_dispatch.offload.cpu_offload import disk_offload
from drivetrain_dispatch.offload.optimizer_offload import disk_offload_optimizer

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "AdamW, foreach, amsgrad": lambda parameters: torch.optim.AdamW(
        parameters, lr=0.01, foreach=True, amsgrad=True
    ),
    "AdamW, fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.01),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.01, momentum=0.5),
}


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 256))


def train(one: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        one(torch.randn(4, 256, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def in_files(optimizer: torch.optim.Optimizer, folder: Path) -> list[bool]:
    """Of each large tensor of an optimizer's state, whether it is the pages of a file of the folder."""
    tensors = [
        value
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.nbytes >= 64 << 10
    ]
    return [file_of(tensor).startswith(str(folder)) for tensor in tensors]


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_weights_and_state_are_trained_on_the_disk(kind: str, tmp_path: Path) -> None:
    offloaded, plain = model(), model()
    disk_offload(offloaded, tmp_path / "weights", "cpu", write_back=True)
    optimizer, theirs = OPTIMIZERS[kind](offloaded.parameters()), OPTIMIZERS[kind](plain.parameters())
    disk_offload_optimizer(optimizer, tmp_path / "state")
    train(offloaded, optimizer)
    train(plain, theirs)
    assert_same_weights(offloaded, plain)
    found = in_files(optimizer, tmp_path / "state")
    assert found
    assert all(found)
    assert list((tmp_path / "state").iterdir()) == []  # files without names
    (file,) = (tmp_path / "weights").iterdir()
    assert all(torch.equal(tensor, plain.state_dict()[name]) for name, tensor in load_file(file).items())


def test_what_is_loaded_goes_to_the_disk_too_and_schedulers_step(tmp_path: Path) -> None:
    plain = model()
    theirs = torch.optim.AdamW(plain.parameters(), lr=0.01)
    train(plain, theirs)
    resumed = copy.deepcopy(plain)
    optimizer = torch.optim.AdamW(resumed.parameters(), lr=0.01)
    offload = disk_offload_optimizer(optimizer, tmp_path)
    optimizer.load_state_dict(copy.deepcopy(theirs.state_dict()))  # torch would share tensors
    assert all(in_files(optimizer, tmp_path))
    schedulers = [torch.optim.lr_scheduler.StepLR(one, 1, 0.5) for one in (optimizer, theirs)]
    for _ in range(2):
        train(resumed, optimizer, 1)
        train(plain, theirs, 1)
        for scheduler in schedulers:
            scheduler.step()
    assert_same_weights(resumed, plain)
    with pytest.raises(OffloadedError, match="offloaded already"):
        disk_offload_optimizer(optimizer, tmp_path)
    offload.remove()
    train(resumed, optimizer, 1)
    disk_offload_optimizer(optimizer, tmp_path)


def test_a_disk_without_room_is_told(tmp_path: Path) -> None:
    trained = model()
    optimizer = torch.optim.AdamW(trained.parameters())
    disk_offload_optimizer(optimizer, tmp_path)
    with full_disk(100_000):
        with pytest.raises(WeightFilesError, match=r"has no room for \d+\.\d\d kB of an optimizer's state"):
            train(trained, optimizer, 1)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(WeightFilesError, match="cannot be made"):
        disk_offload_optimizer(torch.optim.AdamW(trained.parameters()), tmp_path / "file" / "folder")


@pytest.mark.parametrize("kind", ["AdamW", "AdamW, foreach, amsgrad", "AdamW, fused", "RMSprop"])
def test_a_step_is_tried_again_when_the_disk_has_room(kind: str, tmp_path: Path) -> None:

    def wider() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 1024), nn.Linear(1024, 256))

    trained, plain = wider(), wider()
    optimizer, theirs = OPTIMIZERS[kind](trained.parameters()), OPTIMIZERS[kind](plain.parameters())
    disk_offload_optimizer(optimizer, tmp_path)
    with full_disk(300_000):
        with pytest.raises(WeightFilesError, match="has no room"):
            train(trained, optimizer, 1)
    optimizer.zero_grad()
    train(trained, optimizer)
    train(plain, theirs)
    assert_same_weights(trained, plain)
    assert all(in_files(optimizer, tmp_path))
