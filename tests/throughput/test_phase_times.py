"""Seconds by phase: exclusive, complete, and read only once they are known."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain_throughput import PhaseTimes
from drivetrain_throughput.phase_times import PHASES


@dataclass
class Ticks:
    """A clock that goes on by one second at every look, and knows moments once they are due."""

    now: float = 0.0
    known_until: float = float("inf")
    waited: list[float] = field(default_factory=list)

    def moment(self) -> float:
        self.now += 1
        return self.now

    def is_past(self, moment: float) -> bool:
        return moment <= self.known_until

    def seconds_between(self, start: float, end: float) -> float:
        assert self.is_past(end), "a moment was read before it was known"
        return end - start


def test_an_inner_phase_does_not_count_for_the_outer_one() -> None:
    times = PhaseTimes(Ticks())
    times.begin("backward")
    times.begin("communication")
    times.end("communication")
    times.end("backward")
    times.end_step()
    assert times.take_ready() == [{"backward": 2.0, "communication": 1.0, "other": 1.0}]


def test_time_that_is_left_out_is_in_no_step() -> None:
    clock = Ticks()
    times = PhaseTimes(clock)
    times.skip()  # before the first phase, which begins the first step
    times.begin("backward")
    times.end("backward")
    clock.now += 100
    times.skip()
    times.end_step()
    assert times.take_ready() == [{"backward": 1.0, "other": 1.0}]


actions = st.lists(st.tuples(st.sampled_from(["begin", "end", "step"]), st.sampled_from(PHASES)), max_size=40)


@given(actions)
def test_phases_add_up_to_the_time_that_passed(taken: list[tuple[str, str]]) -> None:
    clock = Ticks()
    times = PhaseTimes(clock)
    times.begin("data")
    for action, phase in taken:
        if action == "step":
            times.end_step()
        else:
            getattr(times, action)(phase)
    times.end_step()
    steps = times.take_ready()
    assert sum(sum(seconds.values()) for seconds in steps) == clock.now - 1
    assert times.take_ready() == []


def test_steps_come_out_in_order_once_the_device_has_come_so_far() -> None:
    clock = Ticks(known_until=0)
    times = PhaseTimes(clock)
    for phase in ("forward", "backward"):
        times.begin(phase)
        times.end(phase)
        times.end_step()
    assert times.take_ready() == []
    clock.known_until = 3
    assert times.take_ready() == [{"forward": 1.0, "other": 1.0}]
    clock.known_until = 9
    assert [sorted(seconds) for seconds in times.take_ready()] == [["backward", "other"]]


def test_a_phase_that_an_exception_left_open_ends_with_the_one_around_it_or_the_step() -> None:
    times = PhaseTimes(Ticks())
    times.begin("forward")
    times.begin("communication")
    times.end("forward")
    assert times.innermost is None
    times.begin("communication")
    times.end_step()
    assert times.innermost is None
    times.end("optimizer")  # it never began


@pytest.mark.parametrize("clock", [None, Ticks()])
def test_a_step_before_any_phase_is_no_step(clock: Ticks | None) -> None:
    times = PhaseTimes(clock)
    times.end_step()
    assert times.take_ready() == []
