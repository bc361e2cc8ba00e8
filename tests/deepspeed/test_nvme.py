"""Weights and the optimizer's state on a drive, through DeepSpeed's own engine, where libaio is installed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from deepspeed_engines import backend, error_of, has_libaio
from processes import Completed

WIDTH = 1536  # smaller tensors stay in memory


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def losses(**settings: Any) -> list[float]:
    found: list[float] = []
    with backend(stage=3, **settings) as deepspeed:
        with deepspeed.building():
            model = build()
        (prepared,) = deepspeed.prepare([model], [torch.optim.AdamW(model.parameters(), lr=1e-3)], [])
        for step in range(3):
            loss = prepared.model(torch.full((2, WIDTH), step + 1.0)).square().mean()
            prepared.backward(loss)
            prepared.optimizers[0].step()
            prepared.optimizers[0].zero_grad()
            found.append(loss.item())
    return found


def offloaded(folder: str) -> dict[str, Any]:
    drive = {"nvme_path": Path(folder), "offload_param": "nvme"}
    found: dict[str, Any] = {"plain": losses(), "offloaded": losses(**drive, offload_optimizer="nvme")}
    model = build()
    with backend(stage=3, **drive) as deepspeed:
        found["whole"] = error_of(
            ValueError,
            lambda: deepspeed.prepare([model], [torch.optim.AdamW(model.parameters())], []),
        )
    return found


SCRIPT = f"""
import json, runpy, sys
from drivetrain_state import StateSettings, connect
with connect(StateSettings(device="cpu", watchdog=False), needs_group=True):  # one group for all engines
    print(json.dumps(runpy.run_path({__file__!r})["offloaded"](sys.argv[1])))
"""


@pytest.mark.slow
@pytest.mark.timeout(600)  # an operator is compiled first
@pytest.mark.skipif(not has_libaio(), reason="DeepSpeed's engine for drives needs libaio and its headers")
def test_what_is_on_a_drive_trains_as_in_memory(
    run_ranks_script: Callable[..., list[Completed]], tmp_path: Path
) -> None:
    """In processes of their own: DeepSpeed tries its compiler with what stderr stands for in the system."""
    for rank in run_ranks_script(SCRIPT, str(tmp_path), timeout_seconds=550):
        assert rank.returncode == 0, rank.stderr
        found = json.loads(rank.stdout.splitlines()[-1])
        assert found["offloaded"] == found["plain"]
        assert "would round them to bf16; build the model inside" in found["whole"]
    kinds = {path.name.partition("-")[0] for path in tmp_path.rglob("*.swp")}
    assert {"exp_avg", "exp_avg_sq"} <= kinds
    assert any("param" in kind for kind in kinds)
