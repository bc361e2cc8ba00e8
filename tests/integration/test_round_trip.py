"""A checkpoint goes from one number of ranks to another, and from one backend to another, bit by bit."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.optim import AdamW
from torch.utils.data import DataLoader, TensorDataset

from drivetrain_checkpoint import Checkpointer
from drivetrain_state import Context, Topology
from plain_loop.accelerated import accelerator_of, take_steps

ROUTES = [
    [(1, "single"), (2, "ddp"), (4, "fsdp"), (3, "deepspeed-3"), (1, "single")],
    [(2, "ddp"), (2, "fsdp"), (2, "deepspeed-3"), (1, "single")],
    [(2, "deepspeed-1"), (3, "fsdp"), (4, "deepspeed-2"), (3, "deepspeed-0"), (2, "ddp")],
]


class Model(nn.Module):
    """Layers that no number of ranks but 1 divides, a tied weight, a frozen one, a scalar, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 7)
        self.outer = nn.Linear(7, 7, bias=False)
        self.again = nn.Linear(7, 7, bias=False)
        self.again.weight = self.outer.weight
        self.frozen = nn.Linear(7, 3)
        self.frozen.weight.requires_grad_(False)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(self.again(torch.tanh(self.outer(torch.tanh(self.inner(x))))))


def load_and_save(project_dir: str, backend: str, step: int) -> int:
    """Take up the newest checkpoint, if there is one; else train; and save under another step."""
    with accelerator_of(backend, seed=0, project_dir=project_dir) as accelerator:
        torch.manual_seed(step)  # what is loaded must not be what was built
        model = Model()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        model, optimizer = accelerator.prepare(model, AdamW(trained, lr=0.05))
        accelerator.ema(model, decay=0.5)
        loaded = accelerator.load_state() if step else 0
        if not step:
            take_steps(
                accelerator, model, optimizer, lambda _: model(torch.ones(2, 5)).square().sum(), range(3)
            )
        accelerator.save_state(f"{project_dir}/saved-{step}")
        accelerator.save_state()
    return loaded


def tensors_of(directory: Path) -> dict[str, Tensor]:
    """Every tensor of the newest checkpoint of a folder, but the generators', by its path."""
    loaded = Checkpointer(Context(topology=Topology(), device=torch.device("cpu")), directory).load()
    found: dict[str, Tensor] = {}

    def walk(value: Any, path: str) -> None:
        if isinstance(value, Tensor):
            found[path] = value
        elif isinstance(value, dict):
            for key, inner in value.items():
                walk(inner, f"{path}/{key}")

    walk(loaded.models["model"], "model")
    for index, optimizer in enumerate(loaded.replicated["training"]["model"]["optimizers"]):
        walk(optimizer["state"], f"optimizer {index}")
    assert loaded.models["model"]["outer.weight"] is loaded.models["model"]["again.weight"]
    return found


@pytest.mark.parametrize(
    "route",
    ROUTES,
    ids=lambda route: " ".join(f"{n}x{name}" for n, name in route),
)
@pytest.mark.default_cases("2xddp 2xfsdp 2xdeepspeed-3 1xsingle")
def test_nothing_changes_on_the_way(run_ranks, tmp_path: Path, route: list[tuple[int, str]]) -> None:
    for step, (num_ranks, backend) in enumerate(route):
        answers = run_ranks(
            load_and_save, str(tmp_path), backend, step, num_processes=num_ranks, timeout_seconds=150
        )
        assert answers == [3 if step else 0] * num_ranks
    first = tensors_of(tmp_path / "saved-0")
    assert {path.rpartition("/")[2] for path in first if path.startswith("optimizer")} == {
        "step", "exp_avg", "exp_avg_sq"
    }  # fmt: skip
    for step in range(1, len(route)):
        now = tensors_of(tmp_path / f"saved-{step}")
        assert now.keys() == first.keys()
        for path, tensor in first.items():
            assert torch.equal(now[path].to(tensor.dtype), tensor), (route[step], path)


class Counter:
    """State of a user's own."""

    def __init__(self) -> None:
        self.seen = {1: (2.5, b"x")}

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


@pytest.mark.ranks(2)
def test_every_file_of_a_run_with_all_that_a_checkpoint_holds_is_json_or_safetensors(tmp_path: Path) -> None:
    with accelerator_of("ddp", seed=0, project_dir=tmp_path) as accelerator:
        model = Model()
        optimizer = AdamW([p for p in model.parameters() if p.requires_grad])
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        loader = DataLoader(TensorDataset(torch.ones(12, 5)), batch_size=2, shuffle=True)
        model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
        accelerator.register_for_checkpointing(Counter())
        for (items,) in loader:
            accelerator.backward(model(items).square().sum())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            accelerator.save_state()
        accelerator.wait_for_everyone()
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert len([file for file in files if file.suffix == ".safetensors"]) >= 2 * 3
    for file in files:
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as opened:  # refuses what is anything else
                assert opened.keys() is not None
        else:
            json.loads(file.read_text())
