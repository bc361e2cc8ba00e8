"""Adapters of PEFT: trained, exported alone, read back by PEFT itself, and kept in checkpoints without their base."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import SGD

from drivetrain import Accelerator

QUIET = {"run": {"show_plan": False}}


class Net(nn.Module):
    """Maps (batch, 4) to (batch, 2)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.second = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.norm(self.first(x)).relu())


def base() -> Net:
    torch.manual_seed(0)
    return Net()


def adapted(*, adapters: int = 1) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, target_modules=["first"], modules_to_save=["second"], init_lora_weights=False)
    torch.manual_seed(1)
    model = get_peft_model(base(), config)
    for number in range(1, adapters):
        model.add_adapter(
            f"other{number}", LoraConfig(r=3, target_modules=["first"], init_lora_weights=False)
        )
    return model


def train(accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        accelerator.backward(model(torch.arange(16.0).reshape(4, 4) / 16).square().mean())
        optimizer.step()
        optimizer.zero_grad()


def export_and_read_back(folder: str, backend: str) -> None:
    from peft import PeftModel
    from safetensors.torch import load_file

    with Accelerator(cpu=True, backend=backend, sections=QUIET) as accelerator:
        model = adapted(adapters=2)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        model, optimizer = accelerator.prepare(model, SGD(model.parameters(), lr=0.5))
        train(accelerator, model, optimizer, 2)
        with pytest.raises(
            ValueError, match=r"save_model\(.*\): it holds adapters of PEFT .*trained_only=True"
        ):
            accelerator.save_model(model, Path(folder, "whole"))
        plan = accelerator.save_model(model, folder, trained_only=True)
        assert set(plan.files) == {"adapter_model.safetensors", "other1/adapter_model.safetensors"}
        state = accelerator.get_state_dict(model, everywhere=True)
        assert not torch.equal(
            state["base_model.model.first.lora_A.default.weight"],
            before["base_model.model.first.lora_A.default.weight"],
        )
        accelerator.wait_for_everyone()
        names = set(load_file(Path(folder, "adapter_model.safetensors")))
        assert names == set(plan.files["adapter_model.safetensors"])
        assert not any("base_layer" in name or "norm" in name for name in names)
        found = PeftModel.from_pretrained(base(), folder)
        found.load_adapter(str(Path(folder, "other1")), "other1")
        loaded = found.state_dict()
        for name, value in state.items():
            if "lora" in name or "modules_to_save.default" in name:
                assert torch.equal(loaded[name], value), name


def test_adapters_are_exported_alone_and_read_by_peft(tmp_path: Path) -> None:
    export_and_read_back(str(tmp_path), "single")


@pytest.mark.slow
def test_adapters_are_exported_alone_from_ranks(run_ranks, tmp_path: Path) -> None:
    for backend in ("ddp", "fsdp"):
        run_ranks(export_and_read_back, str(tmp_path / backend), backend)


def go_on(folder: str, backend: str) -> None:
    """A checkpoint of what is trained goes on exactly over the same base."""
    weights: list[dict[str, torch.Tensor]] = []
    for steps, load in ((1, False), (1, True), (2, False)):
        with Accelerator(cpu=True, backend=backend, project_dir=folder, sections=QUIET) as accelerator:
            model = adapted()
            optimizer = SGD(model.parameters(), lr=0.5, momentum=0.9)
            model, optimizer = accelerator.prepare(model, optimizer)
            if load:
                assert accelerator.load_state() == 1
            train(accelerator, model, optimizer, steps)
            if not weights:
                place = accelerator.save_state(trained_only=True)
            weights.append(accelerator.get_state_dict(model, everywhere=True))
    for name, value in weights[2].items():
        torch.testing.assert_close(weights[1][name], value, msg=name)
    stored = (place / "weights-model.json").read_text()
    assert "lora_A" in stored
    assert "base_layer" not in stored
    assert "running_mean" in stored


def test_a_checkpoint_of_what_is_trained_goes_on(tmp_path: Path) -> None:
    go_on(str(tmp_path), "single")
    with Accelerator(cpu=True, project_dir=tmp_path, sections=QUIET) as accelerator:
        model = adapted().requires_grad_(True)
        accelerator.prepare(model, SGD(model.parameters(), lr=0.5, momentum=0.9))
        with pytest.raises(
            ValueError, match=r"saved with trained_only=True.*trained here: \['base_model.model"
        ):
            accelerator.load_state()


def test_a_checkpoint_of_what_is_trained_goes_on_on_ranks(run_ranks, tmp_path: Path) -> None:
    for backend in ("ddp", "fsdp"):
        run_ranks(go_on, str(tmp_path / backend), backend)


def test_a_model_without_adapters_is_exported_without_what_is_frozen(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, sections=QUIET)
    model = base()
    model.first.requires_grad_(False)
    prepared, _ = accelerator.prepare(model, SGD(model.second.parameters()))
    plan = accelerator.save_model(prepared, tmp_path, trained_only=True)
    assert set(plan.tensors) == {"norm.weight", "norm.bias", "second.weight", "second.bias"}
    assert set(accelerator.load_model(prepared, tmp_path, strict=False).missing_keys) >= {"first.weight"}
    frozen = Accelerator(cpu=True, sections=QUIET)
    with pytest.raises(ValueError, match="no parameter of Net requires a gradient"):
        frozen.save_model(frozen.prepare(base().requires_grad_(False)), tmp_path, trained_only=True)
