import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drivetrain_backends import AccumulationError, AccumulationWindow
from drivetrain_backends.accumulation import LossNormalizer
from drivetrain_state import StateSettings, connect


@given(st.integers(1, 6), st.lists(st.integers(1, 20), min_size=1, max_size=5))
def test_windows_have_the_nominal_length_but_at_the_end_of_an_epoch(nominal: int, epochs: list[int]) -> None:
    window = AccumulationWindow(nominal)
    for batches in epochs:
        lengths = []
        for batch in range(batches):
            window.begin(is_last=batch + 1 == batches)
            if window.closing:
                lengths.append(window.length)
        assert sum(lengths) == batches
        assert all(length == nominal for length in lengths[:-1])


def test_a_window_left_open_goes_on_in_the_next_epoch() -> None:
    window = AccumulationWindow(4)
    window.begin()
    window.begin()  # and the loop breaks
    window.begin()
    assert (window.length, window.closing) == (3, False)
    window.begin()
    assert (window.length, window.closing) == (4, True)


@pytest.mark.parametrize("steps", [0, -1])
def test_a_window_holds_a_micro_batch_at_least(steps: int) -> None:
    with pytest.raises(ValueError, match=f"gradient_accumulation_steps={steps}: must be at least 1"):
        AccumulationWindow(steps)


@given(st.lists(st.lists(st.integers(0, 50), min_size=1, max_size=4), min_size=1, max_size=4))
def test_sums_with_counts_become_the_mean_over_all_items(windows: list[list[int]]) -> None:
    context = connect(StateSettings(device="cpu"))
    window = AccumulationWindow(4)
    normalizer = LossNormalizer(context, window)
    for counts in windows:
        summed = torch.zeros((), dtype=torch.float64)
        for i, count in enumerate(counts):
            window.begin(is_last=i + 1 == len(counts))
            summed += normalizer.scale(torch.tensor(3.0 * count, dtype=torch.float64), count)
        result = float(summed * (normalizer.correction(torch.device("cpu")) or 1.0))
        assert result == pytest.approx(3.0 if sum(counts) else 0.0, abs=1e-12)


def test_a_count_may_be_a_tensor_and_stays_on_its_device() -> None:
    normalizer = LossNormalizer(connect(StateSettings(device="cpu")), AccumulationWindow())
    normalizer.scale(torch.tensor(6.0), torch.tensor(3))
    normalizer.correction(torch.device("cpu"))
    assert isinstance(normalizer.reference, torch.Tensor)
    assert normalizer.reference.item() == 3


def test_a_mean_and_a_sum_in_one_window_are_refused() -> None:
    window = AccumulationWindow(2)
    normalizer = LossNormalizer(connect(StateSettings(device="cpu")), window)
    window.begin()
    normalizer.scale(torch.tensor(1.0), None)
    window.begin()
    with pytest.raises(AccumulationError, match="a mean and a sum cannot be added"):
        normalizer.scale(torch.tensor(1.0), 3)


def test_after_a_window_the_other_kind_is_allowed() -> None:
    window = AccumulationWindow(1)
    normalizer = LossNormalizer(connect(StateSettings(device="cpu")), window)
    window.begin()
    normalizer.scale(torch.tensor(1.0), None)
    normalizer.correction(torch.device("cpu"))
    window.begin()
    normalizer.scale(torch.tensor(1.0), 3)
    assert float(normalizer.correction(torch.device("cpu"))) == 1.0
