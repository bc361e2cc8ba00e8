"""The offsets of the hosts' clocks from host 0's clock, measured like NTP by the times of questions and answers."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from drivetrain_doctor.doctor_finding import CheckReport
from drivetrain_doctor.meeting.meeting_store import HostMeeting

QUESTIONS = 5
_ANSWER_SECONDS = 3.0
# Logs and traces of hosts are put side by side, and files' times are compared, to about this.
_SKEW_SECONDS = 1.0
# Beyond this, certificates and signed requests to object stores are refused.
_BROKEN_SECONDS = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockOffset:
    """The time by which a clock is ahead of host 0's, and the bound of its error: half of the round trip."""

    seconds: float
    bound_seconds: float


def estimate_offset(samples: Iterable[tuple[float, float, float]]) -> ClockOffset:
    """Return the offset from the sample with the shortest round trip, which has the narrowest bound.

    A sample has this host's clock before a question, the clock of host 0, and this host's clock after.
    """
    before, there, after = min(samples, key=lambda sample: sample[2] - sample[0])
    return ClockOffset(seconds=(before + after) / 2 - there, bound_seconds=(after - before) / 2)


def ask_host_0(meeting: HostMeeting) -> ClockOffset:
    """Measure this host's clock. Called on every host but 0, while host 0 calls `answer_hosts`."""
    samples: list[tuple[float, float, float]] = []
    for number in range(QUESTIONS):
        # The way is timed by a clock that nobody sets meanwhile.
        wall, begin = time.time(), time.monotonic()
        there = meeting.ask_clock(number)
        samples.append((wall, there, wall + time.monotonic() - begin))
    return estimate_offset(samples)


def answer_hosts(meeting: HostMeeting, ranks: Iterable[int]) -> None:
    """Answer the questions of all hosts, one host after another. Called on host 0."""
    for rank in ranks:
        for number in range(QUESTIONS):
            if not meeting.answer_clock(rank, number, seconds=_ANSWER_SECONDS):
                break  # it is frozen: the next step reports that


def judge_clocks(offsets: Mapping[int, ClockOffset], names: Mapping[int, str]) -> CheckReport:
    """Judge the clocks of all hosts, by rank."""
    if not offsets:
        return CheckReport("no other host answered", is_skipped=True)
    most = max(offsets.values(), key=lambda offset: abs(offset.seconds))
    report = CheckReport(
        f"at most {abs(most.seconds) * 1e3:.1f} ms (+- {most.bound_seconds * 1e3:.1f} ms) from host 0's clock"
    )
    for rank, offset in sorted(offsets.items()):
        seconds, bound = abs(offset.seconds), offset.bound_seconds
        if seconds - bound > _SKEW_SECONDS:
            direction = "ahead of" if offset.seconds > 0 else "behind"
            judge = report.error if seconds - bound > _BROKEN_SECONDS else report.warning
            judge(
                f"the clock of {names[rank]} is {seconds:.1f} s {direction} that of host 0 (+- {bound:.3f} s)",
                why="times in the hosts' logs and traces cannot be compared, and servers refuse certificates and "
                "signed requests (S3 beyond 15 min)",
                repair=f"on {names[rank]}: timedatectl set-ntp true, or chronyc makestep; chronyc tracking shows "
                "the state",
                seconds=offset.seconds,
                bound_seconds=bound,
            )
    return report
