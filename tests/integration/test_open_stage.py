"""ZeRO's stage is chosen by the planner where the settings leave it open."""

from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator
from drivetrain_plan import PlanChoice, PlanError
from drivetrain_plan.choice import Strategy
from planned_models import Perceptron

pytestmark = pytest.mark.usefixtures("deepspeed_operators")


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("room", "said"),
    [(2**30, {}), (2_500_000, {"offload_optimizer": "none"})],
    ids=["room for all", "no offload"],
)
@pytest.mark.slow
def test_the_stage_is_chosen_and_what_is_said_is_kept(
    room: int, said: dict[str, str], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model: nn.Module = Perceptron(128)
    data = TensorDataset(torch.ones(32, 128))
    free = patch("drivetrain_plan.detected._free", lambda *_: room)
    cache = patch("drivetrain_plan.detected.default_cache", lambda: tmp_path / "rates.json")
    sections = {"run": {"show_plan": False}, "deepspeed": {"stage": "auto", **said}}
    with free, cache, Accelerator(backend="deepspeed", cpu=True, sections=sections) as accelerator:
        optimizer = torch.optim.AdamW(model.parameters())
        model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=4))
        for (batch,) in loader:
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        plan = accelerator.plan
        stage = plan.as_dict()["settings"]["deepspeed.stage"]
        assert stage["asked"] == "auto"
        assert plan.facts["plan"].startswith(f"ZeRO {stage['applied']} of 2; ")
        assert stage["reason"].startswith("of the plan ZeRO")


@pytest.mark.slow
def test_a_folder_on_nvme_is_the_users_to_name(tmp_path: Path) -> None:
    model = Perceptron(128)
    free = patch(
        "drivetrain_plan.detected._free", lambda *_: 600_000
    )  # for which states must leave the device
    cache = patch("drivetrain_plan.detected.default_cache", lambda: tmp_path / "rates.json")
    found: dict[bool, bool] = {}
    for is_named in (False, True):
        folder = {"nvme_path": tmp_path} if is_named else {}
        sections = {"run": {"show_plan": False}, "deepspeed": {"stage": "auto", **folder}}
        with free, cache, Accelerator(backend="deepspeed", cpu=True, sections=sections) as accelerator:
            open_backend = accelerator._parts.open_backend  # pyright: ignore[reportPrivateUsage]
            assert open_backend is not None
            found[is_named] = open_backend.allows(PlanChoice(strategy="zero3", offload="nvme"))
            if not is_named:
                loader = DataLoader(TensorDataset(torch.ones(32, 128)), batch_size=4)
                with pytest.raises(
                    PlanError, match=r"no plan that fits keeps what the settings say.*a folder on NVMe"
                ):
                    accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader)
    assert found == {False: False, True: True}


@pytest.mark.parametrize(
    ("said", "allowed"),
    [
        ({"offload_param": "cpu"}, {"zero2": False, "zero3": True}),
        ({"offload_optimizer": "cpu", "offload_param": "none"}, {"zero2": True, "zero3": False}),
    ],
)
def test_a_said_place_is_kept_by_the_stage_that_is_chosen(
    said: dict[str, str], allowed: dict[Strategy, bool]
) -> None:
    sections = {"run": {"show_plan": False}, "deepspeed": {"stage": "auto", **said}}
    with Accelerator(backend="deepspeed", cpu=True, sections=sections) as accelerator:
        open_backend = accelerator._parts.open_backend  # pyright: ignore[reportPrivateUsage]
        assert open_backend is not None
        found = {one: open_backend.allows(PlanChoice(strategy=one, offload="host")) for one in allowed}
        assert found == allowed
