"""The orders of torch's schedules, and backwards in two parts."""

import pytest
import torch
from torch import nn

from drivetrain_parallel.stages.compat import backward_to_input, backward_to_weights, pipeline_order


def test_an_order_names_kinds_stages_and_pieces() -> None:
    order = pipeline_order("ScheduleLoopedBFS", 2, (0, 1, 0, 1), 2)
    assert order[0][:4] == [("forward", 0, 0), ("forward", 0, 1), ("forward", 2, 0), ("forward", 2, 1)]
    assert sorted(order[1]) == sorted(
        (kind, stage, piece) for kind in ("forward", "backward") for stage in (1, 3) for piece in (0, 1)
    )


def test_a_schedule_says_which_numbers_of_pieces_it_takes() -> None:
    with pytest.raises(ValueError, match="micro"):
        pipeline_order("ScheduleDualPipeV", 2, (0, 1, 1, 0), 3)


def test_the_two_parts_of_a_backward_are_the_whole() -> None:
    layers = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    taken = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    gradient = torch.randn(5, 2, dtype=torch.float64)
    layers(taken).backward(gradient)
    expected = [p.grad for p in layers.parameters()], taken.grad
    layers.zero_grad()
    taken.grad = None
    rest = backward_to_input(layers(taken), gradient, taken, layers.parameters())
    assert all(p.grad is None for p in layers.parameters())
    torch.testing.assert_close(taken.grad, expected[1])
    backward_to_weights(layers.parameters(), rest)
    torch.testing.assert_close([p.grad for p in layers.parameters()], expected[0])
