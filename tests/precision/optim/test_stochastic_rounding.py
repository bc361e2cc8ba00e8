import torch
from hypothesis import given
from hypothesis import strategies as st

from drivetrain_precision.optim.stochastic_rounding import round_stochastically


def rounded(values: torch.Tensor, seed: int = 0) -> torch.Tensor:
    return round_stochastically(values, torch.Generator().manual_seed(seed))


@given(st.floats(width=32, allow_nan=False, allow_infinity=False), st.integers(0, 2**31))
def test_a_value_is_rounded_to_one_of_its_neighbours(value: float, seed: int) -> None:
    values = torch.full((5,), value)
    found = rounded(values, seed).float()
    towards_zero = (values.view(torch.int32) & -(1 << 16)).view(torch.float32)
    away = (towards_zero.view(torch.int32) + (1 << 16)).view(torch.float32)
    assert ((found == towards_zero) | (found == away)).all()


def test_the_mean_of_many_roundings_is_the_value() -> None:
    for value in (1.001, -3.337, 1e-3, -2e-39):
        mean = rounded(torch.full((40_000,), value)).double().mean().item()
        assert abs(mean - torch.tensor(value).item()) < 1e-4 * max(abs(value), 1e-38)


def test_what_bf16_holds_exactly_is_unchanged() -> None:
    values = torch.randn(1000).bfloat16().float()
    assert torch.equal(rounded(values).float(), values)


def test_infinities_and_every_kind_of_nan_stay_what_they_are() -> None:
    nans = torch.tensor([0x7FFFFFFF, -1, 0x7F800001], dtype=torch.int32).view(torch.float32)
    assert rounded(nans).isnan().all()
    assert rounded(torch.tensor([torch.inf, -torch.inf])).tolist() == [torch.inf, -torch.inf]


def test_equal_generators_round_alike_and_others_do_not() -> None:
    values = torch.randn(7, 9)
    assert torch.equal(rounded(values, 3), rounded(values, 3))
    assert not torch.equal(rounded(values, 3), rounded(values, 4))
    assert rounded(values.T).shape == (9, 7)
