from typing import Any

import pytest
import torch
from torch import nn

from drivetrain_xla import compilations_of
from drivetrain_xla.compat import sharding_of
from drivetrain_xla.sharding import describe_shapes


class Blocks(nn.Module):
    """A stack of blocks around which other layers stand, and an output in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 12)
        self.blocks = nn.ModuleList(nn.Linear(12, 12) for _ in range(2))
        self.last = nn.Linear(12, 6)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.first(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return {"output": self.last(x)}


def step(accelerator: Any, model: nn.Module, optimizer: Any, rows: int = 8) -> torch.Tensor:
    x = torch.ones(rows, 6, device=accelerator.device)
    with accelerator.accumulate(model):
        accelerator.backward(model(x=x)["output"].square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return x


@pytest.mark.devices(2, 4)
@pytest.mark.parametrize("rows", [8, 5])
def test_a_batch_is_cut_over_devices_and_weights_are_whole(accelerator_on: Any, rows: int) -> None:
    import torch_xla

    accelerator = accelerator_on("data")
    model = Blocks()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    x = step(accelerator, model, optimizer, rows)
    assert sharding_of(torch_xla, x).startswith(
        f"{{devices=[{torch_xla.runtime.global_runtime_device_count()},1]"
    )
    assert {sharding_of(torch_xla, p) for p in model.parameters()} == {"{replicated}"}


@pytest.mark.devices(2, 4)
def test_fsdp_cuts_parameters_and_optimizer_states_also_those_of_a_checkpoint(
    accelerator_on: Any, tmp_path: Any
) -> None:
    import torch_xla

    count = torch_xla.runtime.global_runtime_device_count()
    for is_resumed in (False, True):
        accelerator = accelerator_on("shard", project_dir=tmp_path)
        model = Blocks()
        names = list(model.state_dict())
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        assert list(model.state_dict()) == names
        if is_resumed:
            accelerator.load_state()
            assert_cut(torch_xla, model, optimizer, count)
        step(accelerator, model, optimizer)
        assert_cut(torch_xla, model, optimizer, count)
        accelerator.save_state()
        accelerator.end_training()
    with pytest.raises(ValueError, match=r"compilations_of\(Blocks\): the model is not prepared"):
        compilations_of(model)


def assert_cut(torch_xla: Any, model: nn.Module, optimizer: Any, count: int) -> None:
    for parameter in model.parameters():
        kept = [value for value in optimizer.state[parameter].values() if value.dim()]
        for value in (parameter, *kept):
            assert str(count) in sharding_of(torch_xla, value).partition("]")[0], tuple(value.shape)


@pytest.mark.devices(2, 4)
def test_a_class_that_no_model_has_is_refused() -> None:
    from drivetrain import Accelerator

    sections = {"state": {"device": "xla"}, "xla": {"spmd": "shard", "blocks": ("Layer",)}}
    accelerator = Accelerator(backend="xla", sections=sections)
    with pytest.raises(
        ValueError, match=r"xla\.blocks=Layer: no model has a module with parameters of that class"
    ):
        accelerator.prepare(Blocks())
    accelerator.end_training()


def test_shapes_are_described_by_the_names_of_arguments() -> None:
    found = describe_shapes(
        [torch.ones(2, 3), 5], {"mask": {"inner": torch.ones(2, dtype=torch.bool)}, "flag": True}
    )
    assert found == ["0: (2, 3) float32", "mask: (2,) bool"]
