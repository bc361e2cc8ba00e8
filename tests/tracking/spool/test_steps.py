import logging
from pathlib import Path

import pytest

from drivetrain_tracking import JSONLTracker, ValueNotLoggableError
from drivetrain_tracking.spool.spool_reader import SpoolReader
from drivetrain_tracking.spool.steps import StepOrder, checked_step


def run(folder: Path, steps: list[int]) -> None:
    log = JSONLTracker(folder)
    log.start("bytes", {})
    for step in steps:
        log.log({"loss": 1.0}, step=step)
    log.finish()


def attempts(folder: Path) -> list[tuple[int, int]]:
    lines = [line for _, line in SpoolReader(folder / "log.jsonl").read() if "event" not in line]
    return [(line.get("attempt", 1), line["step"]) for line in lines]


def test_steps_that_a_resumed_run_logs_again_are_an_attempt_of_their_own(tmp_path: Path) -> None:
    run(tmp_path, [1, 2, 3])
    run(tmp_path, [4, 5])
    assert attempts(tmp_path) == [(1, step) for step in range(1, 6)]
    run(tmp_path, [3, 4, 5, 6])
    run(tmp_path, [6, 7])
    assert attempts(tmp_path)[5:] == [*((2, step) for step in (3, 4, 5, 6)), (3, 6), (3, 7)]


@pytest.mark.slow
def test_a_long_event_hides_no_step(tmp_path: Path) -> None:
    run(tmp_path, [1, 2, 3])
    for _ in range(2):  # resumed and ended before a step was logged, with a long event each
        log = JSONLTracker(tmp_path)
        log.start("bytes", {})
        log.record_info({"difference": "x" * (3 << 20)})
        log.finish()
    run(tmp_path, [3])
    assert attempts(tmp_path)[3:] == [(2, 3)]


def test_times_increase_over_runs_also_where_the_clock_went_back(tmp_path: Path) -> None:
    log = JSONLTracker(tmp_path)
    log.start("bytes", {})
    times = [log.now() for _ in range(1000)]
    assert times == sorted(set(times))
    log.finish()


def test_a_step_that_goes_back_within_a_run_is_kept_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    order = StepOrder()
    with caplog.at_level(logging.WARNING):
        assert [order.add(step) for step in (1, 5, 5, 3, 2, None, 6)] == [1] * 7
    assert caplog.text.count("step=3 is logged after step 5") == 1
    assert "step=2" not in caplog.text


def test_a_restored_checkpoint_may_begin_an_attempt(caplog: pytest.LogCaptureFixture) -> None:
    order = StepOrder()
    order.add(5)
    order.expect_repeated_steps()
    assert order.add(6) == 1
    order.expect_repeated_steps()
    assert [order.add(step) for step in (4, 5)] == [2, 2]


@pytest.mark.parametrize("step", [1.5, "3", True, object()])
def test_a_step_that_is_no_integer_is_refused(step: object) -> None:
    with pytest.raises(ValueNotLoggableError, match="a step is an integer"):
        checked_step(step)
