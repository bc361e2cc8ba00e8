"""A whole training step makes the host wait for the device nowhere but where the documentation says so."""

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator
from hardware.devices import OnDevice, here, runs_on_device

# Steps in which optimizers and wrappers make what they keep, and the first gather asks for hosts.
NUM_WARM = 4
NUM_STEPS = 4


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to train, and where the host waits in each step.

    Attributes:
        backend: The backend.
        mode: The precision.
        sections: Further settings.
        places: The functions that wait, with how often each does so in a step.
        torch_waits: Whether torch waits as well, in its own backward.
    """

    backend: str
    mode: str = "no"
    sections: dict[str, dict[str, object]] = field(default_factory=dict)
    places: dict[str, int] = field(default_factory=dict)
    torch_waits: bool = False


def train(way: Way, folder: Path, watch: Callable[[], object]) -> list[str]:
    """Train with all that a step may hold, watched after the first steps; where the host waited."""
    sections = {"tracking": {"throughput_every_steps": 2}, "run": {"show_plan": False}}
    for name, options in way.sections.items():
        sections[name] = sections.get(name, {}) | options
    accelerator = Accelerator(
        backend=way.backend,
        mixed_precision=way.mode,
        gradient_accumulation_steps=2,
        project_dir=folder,
        log_with="jsonl",
        sections=sections,
    )
    accelerator.init_trackers("waits")
    given = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(given.parameters())
    scheduler = LambdaLR(optimizer, lambda step: 0.9**step)
    num_samples = 2 * 4 * accelerator.num_processes * (NUM_WARM + NUM_STEPS)
    loader = DataLoader(TensorDataset(torch.randn(num_samples, 6)), batch_size=4, pin_memory=True)
    model, optimizer, scheduler, loader = accelerator.prepare(given, optimizer, scheduler, loader)
    with ExitStack() as watching:
        found: list[str] = []
        for number, (x,) in enumerate(loader):
            if number == 2 * NUM_WARM:
                found = watching.enter_context(watch())
            with accelerator.accumulate(model):
                loss = model(x).float().square().sum()
                accelerator.backward(loss, count=x[:, 0].isfinite().sum())
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 0.1)
                    accelerator.log({"loss": loss.detach(), "norm": norm})
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    accelerator.end_training()
    return found


def waits(way: Way, folder: Path) -> None:
    """Check that a way to train waits in each step where it says, and nowhere else."""
    found = train(way, folder, here().waits)
    if way.torch_waits:
        found = [wait for wait in found if " < " in wait]  # those with lines of others than torch
    counts = {place: sum(f" {place} " in f"{wait} " for wait in found) for place in way.places}
    assert {place: count / NUM_STEPS for place, count in counts.items()} == way.places, "\n".join(found)
    assert len(found) == sum(counts.values()), "\n".join(found)


# Every wait in a step that the documentation tells of. All other steps have none.
DOCUMENTED = {
    "fp16: whether a gradient overflowed": Way(backend="single", mode="fp16", places={"finalize": 1}),
    "fp16 under fsdp: whether others have scaled its shards": Way(
        backend="fsdp", mode="fp16", places={"finalize": 1, "were_scaled": 1}
    ),
    "run.on_nonfinite: whether one is not finite": Way(
        backend="single", sections={"run": {"on_nonfinite": "skip"}}, places={"clip_grad_norm_": 1}
    ),
    "ddp.check_drift_every: whether ranks differ": Way(
        backend="ddp", sections={"ddp": {"check_drift_every": 1}}, places={"check_replicas": 1}
    ),
    "fsdp.offload: for gradients on their way to the host, and for what scales and clips them": Way(
        backend="fsdp",
        sections={"fsdp": {"offload": True}},
        places={"finalize": 1, "_combine": 1, "scale_to_norm": 1},
        torch_waits=True,
    ),
}


@pytest.mark.parametrize("mode", ["no", "bf16"])
@pytest.mark.default_cases
def test_a_step_waits_for_nothing(on_device: OnDevice, mode: str, tmp_path: Path) -> None:
    for backend in ("single", "ddp", "fsdp"):
        way = Way(backend=backend, mode=mode)
        on_device(waits, way, tmp_path / backend / "1")
        if backend != "single":
            on_device(waits, way, tmp_path / backend / "2", num_processes=2)


@pytest.mark.parametrize("way", DOCUMENTED.values(), ids=DOCUMENTED)
@pytest.mark.default_cases
def test_a_step_waits_as_often_as_is_documented(on_device: OnDevice, way: Way, tmp_path: Path) -> None:
    on_device(waits, way, tmp_path, num_processes=1 if way.backend == "single" else 2)


@runs_on_device(1, 2)
def test_gathering_for_metrics_waits_for_nothing() -> None:
    accelerator = Accelerator(sections={"run": {"show_plan": False}})
    loader = DataLoader(TensorDataset(torch.randn(46, 6)), batch_size=4, pin_memory=True)
    model, loader = accelerator.prepare(nn.Linear(6, 3), loader)
    model.eval()
    with torch.no_grad(), here().waits() as found:
        for (x,) in loader:
            accelerator.gather_for_metrics({"x": x, "y": model(x)})
    assert not found, "\n".join(found)
    accelerator.end_training()


@contextmanager
def refused() -> Generator[list[str]]:
    """Inside, torch raises where the host waits for the card."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield []
    finally:
        torch.cuda.set_sync_debug_mode(before)


def train_where_waits_are_refused(way: Way, folder: Path) -> None:
    train(way, folder, refused)


@pytest.mark.only_on("cuda", why="the mode that raises at a wait is CUDA's own")
@pytest.mark.parametrize("mode", ["no", "bf16"])
@pytest.mark.parametrize("backend", ["single", "ddp", "fsdp"])
def test_a_step_runs_where_cuda_refuses_waits(
    on_device: OnDevice, backend: str, mode: str, tmp_path: Path
) -> None:
    # One process, whose group is NCCL's: gloo waits for its copies in a thread, where this mode raises too.
    on_device(train_where_waits_are_refused, Way(backend=backend, mode=mode), tmp_path)
