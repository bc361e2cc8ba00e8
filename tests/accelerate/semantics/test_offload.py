"""Rows of the table "Where it differs" about models that do not fit."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from accelerate_sides import SIDES, THEIRS, Side, said

pytest.importorskip("accelerate")


def two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def test_weights_between_forwards() -> None:
    """offloaded weights between forwards"""
    for side in SIDES:
        model = two_layers()
        side("accelerate.cpu_offload")(model, execution_device=torch.device("cpu"))
        model(torch.ones(1, 4))
        kinds = {weight.device.type for weight in model.parameters()}
        assert kinds == ({"meta"} if side is THEIRS else {"cpu"})


def test_a_checkpoint_on_the_disk(tmp_path: Path) -> None:
    """a checkpoint of safetensors, loaded onto `"disk"`"""
    saved = two_layers()
    save_file(saved.state_dict(), tmp_path / "model.safetensors", metadata={"format": "pt"})
    for side in SIDES:
        folder = tmp_path / side.name
        folder.mkdir()
        loaded = side("accelerate.load_checkpoint_and_dispatch")(
            two_layers(),
            str(tmp_path / "model.safetensors"),
            device_map={"0": "cpu", "1": "disk"},
            offload_folder=str(folder),
        )
        assert torch.equal(loaded(torch.ones(1, 4)), saved(torch.ones(1, 4)))
        written = sorted(path.name for path in folder.iterdir())
        assert written == (["1.bias.dat", "1.weight.dat", "index.json"] if side is THEIRS else [])


def planned(side: Side, model: nn.Module) -> dict[str, str]:
    return dict(side("accelerate.infer_auto_device_map")(model, max_memory={"cpu": 2100}))


def test_device_map() -> None:
    """`infer_auto_device_map`"""
    model = nn.Sequential(*(nn.Linear(size, size, bias=False) for size in (10, 20, 10)))
    theirs, ours, restored = (planned(side, model) for side in SIDES)
    assert theirs == {"0": "cpu", "1": "disk", "2": "disk"}
    assert ours == restored == {"0": "cpu", "1": "cpu", "2": "disk"}


def test_budget_of_the_disk() -> None:
    """the disk's budget in `max_memory`"""
    for side in SIDES:
        infer = side("accelerate.infer_auto_device_map")
        found = said(lambda infer=infer: dict(infer(two_layers(), max_memory={"cpu": 0, "disk": 10})))
        assert found == {"": "disk"} if side is THEIRS else "the devices may hold 10 B together" in found


def test_retied_shapes() -> None:
    """`retie_parameters` of tensors of other shapes"""
    for side in SIDES:
        model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 3)})
        found = said(
            lambda side=side, model=model: side("accelerate.utils.retie_parameters")(
                model, [["a.weight", "b.weight"]]
            )
        )
        is_one = model["a"].weight is model["b"].weight
        assert (
            (found is None and is_one)
            if side is THEIRS
            else ("tensors of the same shape" in found and not is_one)
        )
