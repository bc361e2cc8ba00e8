import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain_backends import AccumulationError, AccumulationWindow


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


def test_a_window_that_is_left_begins_anew() -> None:
    window = AccumulationWindow(3)
    window.begin()
    window.begin()
    window.reset()
    window.begin()
    assert (window.length, window.closing, window.number) == (1, False, 2)


def test_another_number_of_micro_batches_holds_from_the_next_window_on() -> None:
    window = AccumulationWindow(2)
    window.begin()
    with pytest.raises(
        AccumulationError, match=r"steps = 3 in an open window, after 1 of its 2 micro-batches"
    ):
        window.resize(3)
    window.resize(2)  # what it is already
    window.begin()
    window.resize(3)
    assert (window.num_micro_batches, window.next_num_micro_batches) == (2, 3)
    closing = []
    for _ in range(4):
        window.begin()
        closing.append(window.closing)
    assert closing == [False, False, True, False]
    assert window.num_micro_batches == 3


@pytest.mark.parametrize(("steps", "error"), [(0, ValueError), (2.0, TypeError), (True, TypeError)])
def test_a_number_of_micro_batches_that_is_none_is_refused(steps: object, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"gradient_accumulation_steps={steps}: must be"):
        AccumulationWindow(1).resize(steps)  # type: ignore[arg-type]
    with pytest.raises(error, match=f"gradient_accumulation_steps={steps}: must be"):
        AccumulationWindow(steps)  # type: ignore[arg-type]


def test_a_window_whose_backend_holds_to_its_length_says_why() -> None:
    window = AccumulationWindow(2)
    window.fixed_because = "an engine is made for it"
    with pytest.raises(AccumulationError, match="steps = 4: an engine is made for it"):
        window.resize(4)


def test_a_backward_alone_is_a_window_of_its_own_once_windows_have_one_micro_batch() -> None:
    window = AccumulationWindow(2)
    with pytest.raises(AccumulationError, match=r"backward\(\) outside accumulate\(\) .*steps=2"):
        window.begin_alone()
    window.resize(1)
    window.begin_alone()
    assert (window.num_micro_batches, window.length, window.closing) == (1, 1, True)
