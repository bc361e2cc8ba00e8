"""The private name of torch is what checkpoint relies on: these tests tell when a new torch changes it."""

import torch

from drivetrain_checkpoint.compat import version_of


def test_each_write_in_place_raises_the_version_and_no_read_does() -> None:
    tensor = torch.ones(3)
    before = version_of(tensor)
    tensor.sum()
    tensor.detach().cpu()
    assert version_of(tensor) == before
    tensor.detach().mul_(2)  # shares the count
    tensor[0] = 1
    assert version_of(tensor) == before + 2


def test_an_inference_tensor_counts_nothing() -> None:
    with torch.inference_mode():
        tensor = torch.ones(3)
        tensor.mul_(2)
    assert version_of(tensor) == -1
