"""A recorded autocast computes as torch's and tells what ran in which dtype."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drivetrain_precision import autocast

BF16 = torch.bfloat16


def dtypes(recorded: object) -> dict[str, torch.dtype]:
    return {one.name: one.dtype for one in recorded.operations()}


def test_operations_are_told_with_their_dtype_and_module() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.LayerNorm(4)))
    with autocast("cpu", BF16, record=True, model=model) as recorded:
        for _ in range(2):
            scores = model(torch.ones(2, 4))
        F.mse_loss(scores, scores).backward()
    found = {(one.name, one.module): (one.dtype, one.num_calls) for one in recorded.operations()}
    assert found == {
        ("linear", "0"): (BF16, 2),
        ("layer_norm", "1.0"): (BF16, 2),  # the CPU's autocast has no rule for it
        ("mse_loss", ""): (torch.float32, 1),
    }
    assert [one.name for one in recorded.fp32_operations()] == ["mse_loss"]


def test_casts_and_views_are_no_operations() -> None:
    with autocast("cpu", BF16, record=True) as recorded:
        x = torch.ones(2, 4)
        x.bfloat16().float().view(4, 2).T.reshape(-1)[1:]
        x.shape, x.T  # noqa: B018 - attributes are functions for torch
        x.add_(1)
    assert dtypes(recorded) == {"add": torch.float32}


def test_it_can_be_entered_inside_itself_and_again() -> None:
    recorded = autocast("cpu", BF16, record=True)

    @recorded
    def product(x: Tensor, depth: int) -> Tensor:
        return product(x, depth - 1) if depth else x @ x

    assert product(torch.ones(2, 2), 3).dtype is BF16
    assert not torch.is_autocast_enabled("cpu")
    assert product(torch.ones(2, 2), 0).dtype is BF16
    assert [one.num_calls for one in recorded.operations()] == [2]


def test_an_error_inside_leaves_autocast_off() -> None:
    with pytest.raises(ZeroDivisionError), autocast("cpu", BF16, record=True):
        raise ZeroDivisionError
    assert not torch.is_autocast_enabled("cpu")


def test_modules_are_named_by_class_where_the_model_is_unknown() -> None:
    with autocast("cpu", BF16, record=True) as recorded:
        nn.Linear(2, 2)(torch.ones(1, 2))
    assert [one.module for one in recorded.operations()] == ["Linear"]


def test_a_model_without_a_record_is_refused() -> None:
    with pytest.raises(TypeError, match="pass record=True too"):
        autocast("cpu", BF16, model=nn.Linear(1, 1))
