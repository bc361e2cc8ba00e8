import json
import os
from pathlib import Path

import pytest
import torch
from torch import nn

from drivetrain_dispatch import init_empty_weights
from drivetrain_dispatch.errors import WeightFilesError
from drivetrain_dispatch.loading.load_checkpoint import load_checkpoint_in_model


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(1500, 1600), nn.Linear(3, 3))


@pytest.fixture
def values(tmp_path: Path) -> dict[str, torch.Tensor]:
    """A model's values, one of them saved with its dims swapped, as two files and their index."""
    values = dict(model().state_dict())
    values["0.weight"] = torch.randn(1500, 1600).T
    files = {name: f"pytorch_model-{index % 2}.bin" for index, name in enumerate(values)}
    for file in set(files.values()):
        torch.save({name: values[name] for name, own in files.items() if own == file}, tmp_path / file)
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": files}))
    return values


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_a_model_gets_its_values_from_torchs_files(
    tmp_path: Path, values: dict[str, torch.Tensor], place: str, dtype: torch.dtype | None
) -> None:
    with init_empty_weights():
        empty = model()
    report = load_checkpoint_in_model(empty, tmp_path, {"": place}, dtype=dtype)
    for name, tensor in empty.state_dict().items():
        assert torch.equal(tensor, values[name].to(tensor.dtype))
        assert tensor.dtype == (dtype or torch.float32 if place == "cpu" else torch.float32)
    if place == "disk":
        assert report.mapped["0.weight"].path == tmp_path / "pytorch_model-0.bin"
        assert report.converted_at_use == ({} if dtype is None else dict.fromkeys(values, dtype))
        os.utime(tmp_path / "pytorch_model-0.bin", ns=(0, 0))
        with pytest.raises(WeightFilesError, match="has changed since the model was loaded"):
            report.mapped["0.weight"].check_unchanged()
