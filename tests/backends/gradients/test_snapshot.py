"""Snapshots of gradients tell what other code changed since they were taken."""

import pytest
import torch
from torch import nn

from drivetrain_backends.gradients.snapshot import GradientSnapshot


def test_a_snapshot_tells_edits_from_clearings() -> None:
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(5)]
    for parameter in parameters[:4]:
        parameter.grad = torch.ones(2)
    snapshot = GradientSnapshot(parameters)
    assert not snapshot.differs()  # none is taken
    snapshot.take()
    assert not snapshot.differs()
    parameters[0].grad = None
    parameters[1].grad.zero_()
    parameters[2].grad.add_(1)
    parameters[4].grad = torch.ones(2)
    assert snapshot.differs()
    assert snapshot.edits() == ([2, 4], [0, 1], 3)
    snapshot.drop()
    assert not snapshot.differs()


def test_a_new_gradient_at_the_address_of_a_freed_one_is_another() -> None:
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    snapshot = GradientSnapshot([parameter])
    for _ in range(20):
        snapshot.take()
        address = id(parameter.grad)
        parameter.grad = None
        parameter.grad = torch.ones(2)
        assert snapshot.differs()
        if id(parameter.grad) == address:
            return
    pytest.skip("the allocator gave no address again")
