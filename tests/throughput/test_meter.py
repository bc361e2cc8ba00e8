"""Rates over a window and in total."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain_throughput import StepRecord, ThroughputMeter

seconds = st.floats(1e-3, 1e3)
steps = st.lists(st.tuples(seconds, seconds, st.integers(0, 10_000)), min_size=1, max_size=30)


@given(steps, st.integers(1, 10))
def test_rates_are_counts_over_the_seconds_of_the_same_steps(
    given: list[tuple[float, float, int]], window: int
) -> None:
    meter = ThroughputMeter(window_steps=window)
    for forward, other, samples in given:
        meter.add(StepRecord(phase_seconds={"forward": forward, "other": other}, samples=samples))
    for measured, part in ((meter.over_window(), given[-window:]), (meter.in_total(), given)):
        total = sum(forward + other for forward, other, _ in part)
        assert measured.num_steps == len(part)
        assert measured.seconds == pytest.approx(total)
        assert measured.steps_per_second == pytest.approx(len(part) / total)
        assert measured.samples_per_second == pytest.approx(sum(count for *_, count in part) / total)
        assert sum(measured.phase_seconds.values()) * len(part) == pytest.approx(total)


def test_mfu_is_the_share_of_the_peak_of_all_devices() -> None:
    meter = ThroughputMeter(num_devices=4, peak_flops=1e12)
    meter.add(StepRecord(phase_seconds={"forward": 0.5}))
    assert meter.over_window().mfu is None
    meter.flops_per_step = 1e12
    assert meter.over_window().mfu == pytest.approx(1e12 * 2 / (1e12 * 4))


def test_a_count_that_one_step_lacks_is_unknown_for_the_window() -> None:
    meter = ThroughputMeter(window_steps=1)
    meter.add(StepRecord(phase_seconds={"forward": 1}, samples=8))
    meter.add(StepRecord(phase_seconds={"forward": 1}, samples=8, tokens=64))
    assert meter.in_total().tokens_per_second is None
    assert meter.over_window().tokens_per_second == 64


def test_metrics_are_flat_and_leave_out_what_is_unknown() -> None:
    meter = ThroughputMeter()
    assert meter.over_window().as_metrics() == {}
    meter.add(StepRecord(phase_seconds={"data": 0.5, "forward": 0.5}, samples=8))
    metrics = meter.over_window().as_metrics()
    assert metrics["throughput/samples_per_second"] == 8
    assert metrics["throughput/seconds/data"] == 0.5
    assert metrics["throughput/seconds/communication"] == 0
    assert "throughput/mfu" not in metrics
    assert "throughput/tokens_per_second" not in metrics


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"window_steps": 0}, "window_steps=0: must be at least 1"),
        ({"num_devices": 0}, "num_devices=0: must be at least 1"),
        ({"peak_flops": 0}, "peak_flops=0: must be above 0, in FLOP/s"),
        ({"peak_flops": float("nan")}, "peak_flops=nan: must be above 0"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ThroughputMeter(**arguments)  # pyright: ignore[reportArgumentType]
