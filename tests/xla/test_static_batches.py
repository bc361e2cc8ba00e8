from collections import namedtuple
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from drivetrain_xla import PadTail, masked_sum, pad_rows
from optional_modules import skip_without

Pair = namedtuple("Pair", "x y")


@given(num_samples=st.integers(1, 40), batch_size=st.integers(1, 9), width=st.integers(0, 3))
def test_every_batch_has_one_size_and_its_mean_is_that_of_the_real_rows(
    num_samples: int, batch_size: int, width: int
) -> None:
    data = torch.randn(num_samples, *[2] * width)
    total, number = torch.zeros(()), torch.zeros(())
    for values, mask in DataLoader(list(data), batch_size=batch_size, collate_fn=PadTail(batch_size)):
        assert values.shape == (batch_size, *data.shape[1:])
        loss, count = masked_sum(values, mask)
        total, number = total + loss, number + count
    assert int(number) == data.numel()
    torch.testing.assert_close(total / number, data.mean())


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ({"x": torch.arange(2)}, {"x": torch.tensor([0, 1, 1, 1])}),
        ([torch.arange(2)], [torch.tensor([0, 1, 1, 1])]),
        (
            Pair(torch.arange(2), (torch.ones(2, 3),)),
            Pair(torch.tensor([0, 1, 1, 1]), (torch.ones(4, 3),)),
        ),
    ],
)
def test_batches_keep_their_form(batch: Any, expected: Any) -> None:
    found = pad_rows(batch, 4)
    assert type(found) is type(expected)
    torch.testing.assert_close(found, expected)


def test_a_dict_gets_its_mask_by_name_and_a_list_behind_its_items() -> None:
    samples = [{"x": 1.0}, {"x": 2.0}, {"x": 3.0}]
    assert PadTail(4)(samples)["sample_mask"].tolist() == [True, True, True, False]
    assert PadTail(4)([(1, 2)])[2].tolist() == [True, False, False, False]


def test_rows_that_a_collate_function_leaves_out_are_not_real() -> None:
    pad = PadTail(4, collate=lambda samples: torch.tensor([s for s in samples if s is not None]))
    values, mask = pad([1.0, None, 3.0, None])
    assert (values.tolist(), mask.tolist()) == ([1.0, 3.0, 3.0, 3.0], [True, True, False, False])


def test_padding_that_is_not_finite_is_in_no_sum() -> None:
    values = torch.tensor([[1.0, 2.0], [torch.nan, torch.inf]], requires_grad=True)
    loss, count = masked_sum(values, torch.tensor([True, False]))
    loss.backward()
    assert (loss.item(), count.item()) == (3.0, 2)
    assert values.grad is not None
    assert values.grad.tolist() == [[1.0, 1.0], [0.0, 0.0]]


@pytest.mark.parametrize(
    ("batch", "error", "message"),
    [
        (
            {"x": "text"},
            TypeError,
            "a batch that holds str cannot be padded: PadTail pads tensors with a row",
        ),
        ([torch.ones(())], TypeError, r"a batch that holds a tensor of shape \(\) cannot be padded"),
        (
            {"x": torch.ones(3), "y": [torch.ones(2)]},
            ValueError,
            "a batch whose tensors have 2 and 3 rows cannot be padded: they have a row for each sample",
        ),
        ({}, ValueError, "a batch whose tensors have no rows cannot be padded"),
        (torch.ones(5), ValueError, "a batch of 5 rows cannot be padded to 4"),
        (torch.ones(0), ValueError, "a batch of 0 rows cannot be padded to 4"),
    ],
)
def test_what_cannot_be_padded_is_refused(batch: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        pad_rows(batch, 4)


def test_a_batch_of_no_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="batch_size=0: must be at least 1"):
        PadTail(0)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_metrics_leave_the_padding_out(num_workers: int) -> None:
    skip_without("drivetrain")
    from drivetrain import Accelerator

    accelerator = Accelerator(cpu=True)
    loader = DataLoader(range(10), batch_size=4, collate_fn=PadTail(4), num_workers=num_workers)
    prepared: Any = accelerator.prepare(loader)
    rows = [accelerator.gather_for_metrics((values, {"mask": mask})) for values, mask in prepared]
    assert torch.cat([values for values, _ in rows]).tolist() == list(range(10))
    assert all(more["mask"].all() for _, more in rows)
    accelerator.end_training()
