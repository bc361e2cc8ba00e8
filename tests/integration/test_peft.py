"""Adapters of PEFT: trained, exported alone, read back by PEFT itself, and kept in checkpoints without their base."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from plain_loop.accelerated import DDP, FSDP, SINGLE, accelerator_of, take_steps, weights_of


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


def train(accelerator: Any, model: nn.Module, optimizer: Any, steps: int) -> None:
    x = torch.arange(16.0).reshape(4, 4) / 16
    take_steps(accelerator, model, optimizer, lambda _: model(x).square().mean(), range(steps))


BACKENDS = pytest.mark.parametrize("backend", [SINGLE, DDP, FSDP])


@BACKENDS
@pytest.mark.default_cases("single")
def test_adapters_are_exported_alone_and_read_by_peft(tmp_path: Path, backend: str) -> None:
    from peft import PeftModel
    from safetensors.torch import load_file

    with accelerator_of(backend) as accelerator:
        model = adapted(adapters=2)
        first = "base_model.model.first.lora_A.default.weight"
        before = model.state_dict()[first].clone()
        model, optimizer = accelerator.prepare(model, SGD(model.parameters(), lr=0.5))
        train(accelerator, model, optimizer, 2)
        said = r"save_model\(.*\): it holds adapters of PEFT .*trained_only=True"
        with pytest.raises(ValueError, match=said):
            accelerator.save_model(model, tmp_path / "whole")
        plan = accelerator.save_model(model, tmp_path, trained_only=True)
        assert set(plan.files) == {"adapter_model.safetensors", "other1/adapter_model.safetensors"}
        state = weights_of(accelerator, model)
        assert not torch.equal(state[first], before)
        accelerator.wait_for_everyone()
        names = set(load_file(tmp_path / "adapter_model.safetensors"))
        assert names == set(plan.files["adapter_model.safetensors"])
        assert not any("base_layer" in name or "norm" in name for name in names)
        found = PeftModel.from_pretrained(base(), str(tmp_path))
        found.load_adapter(str(tmp_path / "other1"), "other1")
        loaded = found.state_dict()
        for name, value in state.items():
            if "lora" in name or "modules_to_save.default" in name:
                assert torch.equal(loaded[name], value), name


@BACKENDS
@pytest.mark.default_cases("fsdp")
def test_a_checkpoint_of_what_is_trained_goes_on_exactly_over_the_same_base(
    tmp_path: Path, backend: str
) -> None:
    weights: list[dict[str, torch.Tensor]] = []
    for steps, load in ((1, False), (1, True), (2, False)):
        with accelerator_of(backend, project_dir=tmp_path) as accelerator:
            model = adapted()
            optimizer = SGD(model.parameters(), lr=0.5, momentum=0.9)
            model, optimizer = accelerator.prepare(model, optimizer)
            if load:
                assert accelerator.load_state() == 1
            train(accelerator, model, optimizer, steps)
            if not weights:
                place = accelerator.save_state(trained_only=True)
            weights.append(weights_of(accelerator, model))
    for name, value in weights[2].items():
        torch.testing.assert_close(weights[1][name], value, msg=name)
    stored = (place / "weights-model.json").read_text()
    assert "lora_A" in stored
    assert "base_layer" not in stored
    assert "running_mean" in stored
    with accelerator_of(backend, project_dir=tmp_path) as accelerator:
        model = adapted().requires_grad_(True)
        accelerator.prepare(model, SGD(model.parameters(), lr=0.5, momentum=0.9))
        said = r"saved with trained_only=True.*trained here: \['base_model.model"
        with pytest.raises(ValueError, match=said):
            accelerator.load_state()


def test_a_model_without_adapters_is_exported_without_what_is_frozen(tmp_path: Path) -> None:
    accelerator = accelerator_of()
    model = base()
    model.first.requires_grad_(False)
    prepared, _ = accelerator.prepare(model, SGD(model.second.parameters()))
    plan = accelerator.save_model(prepared, tmp_path, trained_only=True)
    assert set(plan.tensors) == {"norm.weight", "norm.bias", "second.weight", "second.bias"}
    assert set(accelerator.load_model(prepared, tmp_path, strict=False).missing_keys) >= {"first.weight"}
    frozen = accelerator_of()
    with pytest.raises(ValueError, match="no parameter of Net requires a gradient"):
        frozen.save_model(frozen.prepare(base().requires_grad_(False)), tmp_path, trained_only=True)
