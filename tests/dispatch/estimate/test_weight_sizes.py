from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from drivetrain_dispatch.estimate.weight_sizes import sizes_of_files, sizes_of_model
from drivetrain_weights import WeightFilesError


def test_parameters_are_counted_by_block_and_dtype() -> None:
    model = nn.Sequential(nn.Linear(10, 10), nn.Sequential(nn.Linear(10, 30), nn.Linear(30, 10)))
    sizes = sizes_of_model(model, ["Sequential"])
    assert sizes.num_parameters == 110 + 330 + 310
    assert sizes.bytes_by_dtype == {"fp32": 3000, "bf16": 1500, "int8": 750, "int4": 375}
    assert (sizes_of_model(model[1], []).largest_block, sizes.model) == ("0", "Sequential")


def test_files_tell_by_their_headers(tmp_path: Path) -> None:
    tensors = {
        "embed.weight": torch.zeros(7, 4, dtype=torch.bfloat16),
        "layers.0.a.weight": torch.zeros(4, 4),
        "layers.1.a.weight": torch.zeros(4, 4),
        "layers.1.b.weight": torch.zeros(4, 4),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    sizes = sizes_of_files(tmp_path)
    assert sizes.num_parameters == 28 + 3 * 16
    assert (sizes.largest_block, sizes.largest_block_parameters) == ("layers.1", 32)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightFilesError):
        sizes_of_files(tmp_path)
