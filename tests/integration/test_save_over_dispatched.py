"""A model is saved into the folder that it was loaded from, whose files it computes with."""

from pathlib import Path

import torch
from torch import nn

from drivetrain_checkpoint import save_model
from drivetrain_dispatch import load_checkpoint_and_dispatch, load_checkpoint_in_model


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))


def test_a_model_goes_on_after_it_was_saved_over_its_own_files(tmp_path: Path) -> None:
    model, x = build(), torch.randn(2, 3)
    expected = model(x)
    save_model(model, tmp_path)
    load_checkpoint_and_dispatch(model, tmp_path, {"0": "cpu", "1": "disk"})
    torch.testing.assert_close(model(x), expected)
    save_model(model, tmp_path)
    again = build()
    load_checkpoint_in_model(again, tmp_path)
    torch.testing.assert_close(again(x), expected)
    torch.testing.assert_close(model(x), expected)
