import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain_memory.leaks.growth import LEAST_POINTS, STEADY, fit_growth, is_fragmented, theil_sen, thin


@given(rate=st.floats(1, 1e6), noise=st.floats(0, 3), seed=st.integers(0, 1000), count=st.integers(24, 300))
def test_a_growth_is_found_under_noise_of_several_steps_of_it(
    rate: float, noise: float, seed: int, count: int
) -> None:
    draw = random.Random(seed)
    found = fit_growth(range(count), [rate * (i + draw.uniform(-noise, noise)) for i in range(count)])
    assert found.goes_on
    assert found.rate == pytest.approx(rate, rel=0.25)
    assert found.least_rate <= found.rate


@given(seed=st.integers(0, 500), spikes=st.integers(0, 10))
def test_spikes_and_noise_without_growth_raise_no_alarm(seed: int, spikes: int) -> None:
    draw = random.Random(seed)
    values = [draw.gauss(1e9, 1e5) for _ in range(60)]
    for _ in range(spikes):
        values[draw.randrange(60)] += 1e8
    assert not fit_growth(range(60), values, least_total=1e6).goes_on


def test_a_cache_that_fills_is_told_apart() -> None:
    found = fit_growth(range(60), [1e6 * min(i, 25) for i in range(60)])
    assert (found.goes_on, found.slowed) == (False, True)


def test_a_growth_below_the_least_total_does_not_count() -> None:
    assert not fit_growth(range(60), list(range(60)), least_total=100).goes_on
    assert fit_growth(range(60), list(range(60)), least_total=10).goes_on


def test_few_points_say_nothing() -> None:
    assert fit_growth(range(LEAST_POINTS - 1), range(LEAST_POINTS - 1)) == STEADY


def test_a_staircase_grows_by_its_slope() -> None:
    rate, least = theil_sen(thin([(float(i), 100.0 * (i // 5)) for i in range(200)]))
    assert rate == pytest.approx(20, rel=0.1)
    assert least > 0


@given(st.lists(st.floats(0, 1), min_size=1, max_size=500))
def test_thinned_points_keep_their_order_and_range(values: list[float]) -> None:
    points = thin([(float(i), value) for i, value in enumerate(values)])
    assert len(points) <= max(64, 1)
    assert [x for x, _ in points] == sorted(x for x, _ in points)
    assert min(values) <= points[0][1] <= max(values)


@pytest.mark.parametrize(
    ("growing", "expected"),
    [
        ({"resident", "heap_free"}, True),
        ({"resident", "heap_free", "heap_used"}, False),
        ({"resident"}, False),
        ({"device_reserved"}, True),
        ({"device_reserved", "device_allocated"}, False),
        (set(), False),
    ],
)
def test_an_allocator_that_takes_more_than_is_in_use_is_fragmented(growing: set[str], expected: bool) -> None:
    names = ("resident", "heap_free", "heap_used", "device_reserved", "device_allocated")
    steps = range(30)
    growth = {name: fit_growth(steps, [step * (name in growing) for step in steps]) for name in names}
    assert is_fragmented(growth) is expected
