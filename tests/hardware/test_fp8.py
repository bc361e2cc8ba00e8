"""Training in fp8 on a device that is neither CPU nor CUDA."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain import Accelerator
from drivetrain_precision import LayerFilter, PrecisionError, TorchaoRecipe, convert_model

QUIET: dict[str, Any] = {"run": {"show_plan": False}}
ALL = LayerFilter(skip_first=False, skip_last=False)


def refused() -> None:
    with pytest.raises(
        PrecisionError, match=r"'torchao_tensorwise': it needs an Ada, .*, and the device is npu:0"
    ):
        Accelerator(mixed_precision="fp8", fp8_recipe=TorchaoRecipe(layers=ALL), sections=QUIET)


def losses(scaling: Any, cpu: bool) -> list[float]:
    """The losses of a model that was converted by hand, which no check of the device refuses."""
    with Accelerator(mixed_precision="bf16", sections=QUIET, cpu=cpu) as accelerator:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 128))
        convert_model(model, TorchaoRecipe(scaling=scaling, layers=ALL))
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        rows = torch.randn(8, 128).to(accelerator.device)
        found: list[float] = []
        for _ in range(3):
            loss = model(rows).float().square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
    return found


def by_hand() -> None:
    for scaling in ("tensorwise", "rowwise", "mxfp8"):
        found = losses(scaling, cpu=False)
        assert found[-1] < found[0]
        assert found == pytest.approx(losses(scaling, cpu=True), rel=0.01)
    with pytest.raises(PrecisionError, match="torchao_nvfp4: it needs a Blackwell or newer GPU"):
        losses("nvfp4", cpu=False)


@pytest.mark.only_on("simulated", why="a card has the units")
def test_what_has_no_units_is_refused_and_what_is_converted_by_hand_is_emulated(
    on_device: Callable[..., list[object]],
) -> None:
    pytest.importorskip("torchao", reason="an extra of drivetrain-precision brings it")
    on_device(refused)
    on_device(by_hand)
