"""Weights in torch's own format, as the installed Accelerate writes them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accelerate_sides import OURS, THEIRS
from drivetrain_accelerate.pickled_weights import write_pickled_weights

pytest.importorskip("accelerate")


def tied_model() -> nn.Module:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(8, 8), nn.Linear(4, 4), nn.Linear(8, 8))
    model[2].weight = model[0].weight
    return model


def content_of(folder: Path) -> dict[str, Any]:
    """Return what each file holds, tensors as lists."""
    found: dict[str, Any] = {}
    for path in folder.iterdir():
        if path.suffix == ".json":
            found[path.name] = json.loads(path.read_text())
        else:
            weights = torch.load(path)
            found[path.name] = {name: value.tolist() for name, value in weights.items()}
    return found


@pytest.mark.parametrize("size", ["10GB", "0.3KB", 300, 1])
def test_files_and_index_are_those_of_the_real_one(tmp_path: Path, size: int | str) -> None:
    for side in (THEIRS, OURS):
        with side.accelerator() as accelerator:
            model = accelerator.prepare(tied_model())
            accelerator.save_model(model, tmp_path / side.name, max_shard_size=size, safe_serialization=False)
    theirs, ours = (content_of(tmp_path / side.name) for side in (THEIRS, OURS))
    assert theirs == ours
    assert len(theirs) == {"10GB": 1, "0.3KB": 3, 300: 3, 1: 6}[size]


def test_an_earlier_export_is_replaced_and_other_files_stay(tmp_path: Path) -> None:
    weights = tied_model().state_dict()
    (tmp_path / "notes.tmp").touch()
    write_pickled_weights(weights, tmp_path, max_shard_size=300)
    assert len(list(tmp_path.iterdir())) == 4
    write_pickled_weights(weights, tmp_path, max_shard_size="1GB")
    assert {path.name for path in tmp_path.iterdir()} == {"notes.tmp", "pytorch_model.bin"}
    with pytest.raises(ValueError, match="max_shard_size='many'"):
        write_pickled_weights(weights, tmp_path, max_shard_size="many")
