"""A run that goes on elsewhere: from the CPU to XLA to FSDP2, and with XLA's generator."""

import os
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain_state import set_seed

pytestmark = pytest.mark.devices(1, 2, 4)


def start(accelerator: Any, dropout: float = 0.0) -> Any:
    """Return a prepared model, optimizer, loader and scheduler, always the same."""
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(*torch.randn(2, 160, 6, generator=generator).double())
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 6)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    loader = DataLoader(data, batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(3))
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=12)
    return accelerator.prepare(model, optimizer, loader, scheduler)


def train(accelerator: Any, objects: Any, num_steps: int) -> list[float]:
    model, optimizer, loader, scheduler = objects
    losses: list[float] = []
    for x, y in islice(loader, num_steps):
        with accelerator.accumulate(model):
            loss = (model(x) - y).square().mean()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.filterwarnings(
    "ignore:Full backward hook is firing:UserWarning"
)  # torch-xla's, on the first block
@pytest.mark.parametrize("spmd", ["off", "data", "shard"])
def test_a_run_goes_on_from_the_cpu_on_xla_and_under_fsdp2(
    spmd: str, num_devices: int, tmp_path: Path
) -> None:
    from drivetrain import Accelerator

    if (spmd == "off") != (num_devices == 1):
        pytest.skip(f"{spmd} is for another number of devices than {num_devices}")
    whole = Accelerator(cpu=True)
    expected = train(whole, start(whole), 12)
    whole.end_training()
    found: list[float] = []
    on_xla = {"state": {"device": "xla"}, "xla": {"spmd": spmd}}
    ways: list[dict[str, Any]] = [
        {"cpu": True},
        {"backend": "xla", "sections": on_xla},
        {"backend": "fsdp", "cpu": True},
    ]
    for way in ways:
        accelerator = Accelerator(project_dir=tmp_path, **way)
        objects = start(accelerator)
        if found:
            accelerator.load_state()
        found += train(accelerator, objects, 4)
        accelerator.save_state()
        accelerator.end_training()
    assert found == pytest.approx(expected, abs=1e-12)


def test_dropout_draws_the_same_numbers_after_a_resume(accelerator_on: Any, tmp_path: Path) -> None:
    whole = accelerator_on()
    objects = start(whole, dropout=0.5)
    set_seed(7)
    expected = train(whole, objects, 5)
    whole.end_training()
    stopped = accelerator_on(project_dir=tmp_path)
    objects = start(stopped, dropout=0.5)
    set_seed(7)
    found = train(stopped, objects, 2)
    stopped.save_state()
    stopped.end_training()
    set_seed(5)
    resumed = accelerator_on(project_dir=tmp_path)
    objects = start(resumed, dropout=0.5)
    resumed.load_state()
    assert found + train(resumed, objects, 3) == pytest.approx(expected, abs=1e-12)


_CACHED = """
import sys, torch
from drivetrain import Accelerator
from drivetrain_xla import compilations_of
accelerator = Accelerator(backend="xla", project_dir=sys.argv[1], sections={"state": {"device": "xla"}})
model = torch.nn.Linear(4, 3)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
for _ in range(3):
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(2, 4, device=accelerator.device)).sum())
        optimizer.step()
        optimizer.zero_grad()
import torch_xla.debug.metrics as metrics
print("compiled", sum(one.num_graphs for one in compilations_of(model)))
print("missed", metrics.counter_value("PersistentCacheMiss"))
found = ("PersistentCacheHit", "PersistentCacheDeserializeFailure")
print("found", next(filter(None, map(metrics.counter_value, found)), None))
"""


def test_a_second_run_finds_the_compiled_graphs_of_the_first_in_the_projects_folder(tmp_path: Path) -> None:
    """XLA's processor cannot load what it has written there, and compiles it again; a TPU loads it."""
    command = [sys.executable, "-c", _CACHED, str(tmp_path)]
    # Without the folder that an earlier test of this process has opened.
    variables = {name: value for name, value in os.environ.items() if "PERSISTENT_CACHE" not in name}
    first, second = (
        subprocess.run(
            command, env=variables, capture_output=True, text=True, check=True, timeout=120
        ).stdout.split()
        for _ in range(2)
    )
    number = first[1]
    assert int(number) >= 1
    assert first == ["compiled", number, "missed", number, "found", "None"]
    assert second == ["compiled", number, "missed", "None", "found", number]
    assert any((tmp_path / "xla_cache").iterdir())
