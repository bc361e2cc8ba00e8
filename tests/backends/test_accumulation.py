import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain_backends import AccumulationWindow


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


def test_a_window_that_is_left_begins_anew() -> None:
    window = AccumulationWindow(3)
    window.begin()
    window.begin()
    window.reset()
    window.begin()
    assert (window.length, window.closing, window.number) == (1, False, 2)
