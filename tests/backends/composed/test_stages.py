"""A batch is cut into micro-batches by its samples, whatever it is made of."""

from copy import deepcopy

import pytest
import torch

from drivetrain_backends.composed.stages import cut_batch


def test_a_batch_is_cut_by_its_samples() -> None:
    batch = {"x": torch.arange(10).view(5, 2), "y": [torch.arange(5), "all"], "scale": torch.ones(3)}
    pieces = cut_batch(deepcopy(batch), 2)
    assert [share for _, share in pieces] == [0.4, 0.6]
    assert [piece["y"][0].tolist() for piece, _ in pieces] == [[0, 1], [2, 3, 4]]
    assert all(piece["y"][1] == "all" and piece["scale"].tolist() == [1, 1, 1] for piece, _ in pieces)
    assert len(cut_batch(torch.ones(3, 2), 8)) == 3
    (first, share), *_ = cut_batch({"tokens": torch.zeros(8, 16), "positions": torch.arange(16)}, 4)
    assert (first["tokens"].shape, first["positions"].shape, share) == ((2, 16), (16,), 0.25)
    with pytest.raises(ValueError, match="tensors of 3 and of 4 rows: say which count samples"):
        cut_batch([torch.zeros(4, 2), torch.zeros(3, 2)], 2)
    with pytest.raises(ValueError, match="no tensor with samples"):
        cut_batch({"words": ["a"]}, 2)
