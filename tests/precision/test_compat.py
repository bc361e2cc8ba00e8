"""Each private name of torch is what precision relies on: these tests tell when a new torch changes one."""

import math

import pytest
import torch

from drivetrain_precision import compat


def scalar(value: float) -> torch.Tensor:
    return torch.tensor(value)


@pytest.mark.parametrize(("value", "found"), [(4.0, 0.0), (math.inf, 1.0), (math.nan, 1.0)])
def test_gradients_are_unscaled_in_place_and_a_value_that_is_not_finite_is_found(
    value: float, found: float
) -> None:
    gradients, found_inf = [torch.full((2,), 8.0), torch.tensor([value])], scalar(0.0)
    compat.unscale(gradients, found_inf, scalar(0.25))
    assert gradients[0].tolist() == [2.0, 2.0]
    assert found_inf.item() == found


def test_what_was_found_before_stays_found() -> None:
    found_inf = scalar(1.0)
    compat.unscale([torch.ones(2)], found_inf, scalar(0.25))
    assert found_inf.item() == 1.0


@pytest.mark.parametrize(
    ("tracker", "found", "expected"), [(0, 0.0, (8.0, 1)), (2, 0.0, (16.0, 0)), (2, 1.0, (4.0, 0))]
)
def test_the_scale_grows_after_the_interval_and_falls_after_an_overflow(
    tracker: int, found: float, expected: tuple[float, int]
) -> None:
    scale, growth_tracker = scalar(8.0), torch.tensor(tracker, dtype=torch.int32)
    compat.update_scale(
        scale, growth_tracker, scalar(found), growth_factor=2.0, backoff_factor=0.5, growth_interval=3
    )
    assert (scale.item(), growth_tracker.item()) == expected


def test_torch_tells_of_bf16_units_as_the_system_does() -> None:
    try:
        with open("/proc/cpuinfo") as file:
            flags = file.read()
    except FileNotFoundError:
        pytest.skip("this system lists no instructions of its processor")
    assert compat.has_bf16_units() == ("avx512_bf16" in flags)
