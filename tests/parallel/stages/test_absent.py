"""What depends on an absent tensor is absent, of the shape it would have; its values cannot be read or written."""

import pytest
import torch
import torch.nn.functional as F

from drivetrain_parallel.errors import ParallelPlanError
from drivetrain_parallel.stages.absent import AbsentTensor, AbsentValueError, absent_like


def absent(*shape: int) -> AbsentTensor:
    return absent_like(torch.randn(shape), "words.weight")


def test_shapes_dtypes_and_devices_are_those_of_the_computation() -> None:
    x = absent(2, 3, 8)
    weight = torch.randn(5, 8, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        found = F.linear(x, weight)
    assert isinstance(found, AbsentTensor)
    assert (found.shape, found.dtype, found.device.type, found.of) == (
        (2, 3, 5),
        torch.bfloat16,
        "cpu",
        "words.weight",
    )
    assert type(torch.arange(x.shape[1], device=x.device)) is torch.Tensor
    assert F.scaled_dot_product_attention(x, x, x).shape == (2, 3, 8)
    assert isinstance(F.dropout(x, 0.5), AbsentTensor)
    assert F.cross_entropy(found.float().flatten(0, 1), torch.zeros(6, dtype=torch.long)).shape == ()


def test_what_reads_a_tensor_reads_what_was_received_for_it() -> None:
    x = absent(2, 3)
    before, x.received = x * 2, torch.ones(2, 3, requires_grad=True)
    assert isinstance(before, AbsentTensor)
    found = (x + torch.tanh(x)).sum()
    found.backward()
    assert not isinstance(found, AbsentTensor)
    torch.testing.assert_close(x.received.grad, 2 - torch.tanh(torch.ones(2, 3)) ** 2)
    assert x.anew().received is None


def test_writing_in_place_stays_absent_and_writes_nothing_else() -> None:
    x = absent(2)
    assert x.add_(1) is x
    held = torch.zeros(2)
    with pytest.raises(ParallelPlanError, match="writes what follows from words"):
        held.add_(x)
    assert not held.any()


@pytest.mark.parametrize(
    "read", [lambda x: x.item(), lambda x: bool(x), lambda x: x.nonzero(), lambda x: x.tolist()]
)
def test_values_cannot_be_read(read: object) -> None:
    with pytest.raises(AbsentValueError, match="values that follow from words"):
        read(absent())  # type: ignore[operator]
