from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from drivetrain_plan.model.weight_sizes import sizes_of_files, sizes_of_model
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


@pytest.mark.parametrize(
    ("names", "model"),
    [
        (["w.r0.safetensors", "w.r1.safetensors"], "w.r0.safetensors, 1 of 2 files of the weights"),
        (["w.r0.2.safetensors", "w.r1.2.safetensors"], "w.r0.2.safetensors, 1 of 2 files of the weights"),
        (["m-1-of-2.safetensors", "m-2-of-2.safetensors"], "m-1-of-2.safetensors, 1 of 2 files of the weights"),
        (["w.r0.safetensors", "v.r1.safetensors"], "w.r0.safetensors"),
    ],
    ids=["ranks", "ranks of a later attempt", "shards", "one rank"],
)  # fmt: skip
def test_one_of_several_files_is_named_as_such(tmp_path: Path, names: list[str], model: str) -> None:
    for name in names:
        save_file({"0.weight": torch.zeros(4, 4)}, tmp_path / name)
    assert sizes_of_files(tmp_path / names[0]).model == model


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightFilesError):
        sizes_of_files(tmp_path)
