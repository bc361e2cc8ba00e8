from collections.abc import Sequence
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain_dispatch.planning.device_map import Tier
from drivetrain_dispatch.planning.pipeline_model import Bandwidths, forward_seconds

RATES = Bandwidths(to_device=10.0, from_disk=5.0)


class Work(NamedTuple):
    """A part of a model, as `forward_seconds` takes it."""

    compute_seconds: float
    size_bytes: int
    source: Tier = Tier.DEVICE
    device: int = 0
    left_bytes: int | None = None


class PartTimes(NamedTuple):
    """The start and end of a part's read, copy and computation; (0, 0) for a step that it skips."""

    read: tuple[float, float]
    copied: tuple[float, float]
    computed: tuple[float, float]


def play(works: Sequence[Work], rates: Bandwidths, *, windows: Sequence[float]) -> list[PartTimes]:
    """The timeline that `forward_seconds` sums up, found by looking back over all parts for each."""
    turns: list[PartTimes] = []
    leaving: list[list[tuple[float, int]]] = [[] for _ in windows]  # in turn: when, and how many bytes
    for index, work in enumerate(works):
        read = copied = (0.0, 0.0)
        begin = max((turn.computed[1] for turn in turns), default=0.0)
        if work.source is not Tier.DEVICE:
            come = sum(
                other.size_bytes
                for other in works[: index + 1]
                if other.device == work.device and other.source is not Tier.DEVICE
            )
            room, gone = 0.0, 0
            for when, size_bytes in leaving[work.device]:
                if come - gone <= windows[work.device]:
                    break
                room, gone = when, gone + size_bytes
            arrived = room
            if work.source is Tier.DISK:
                start = max([room, *(turn.read[1] for turn in turns)])
                arrived = start + work.size_bytes / rates.from_disk
                read = (start, arrived)
            start = max([arrived, *(turn.copied[1] for turn in turns)])
            copied = (start, start + work.size_bytes / rates.to_device)
            begin = max(begin, copied[1])
        turns.append(PartTimes(read, copied, (begin, begin + work.compute_seconds)))
        given_up = (
            work.size_bytes if work.left_bytes is None and work.source is not Tier.DEVICE else work.left_bytes
        )
        if given_up:
            leaving[work.device].append((turns[-1].computed[1], given_up))
    return turns


def hosts(seconds: float, *sizes: int) -> list[Work]:
    return [Work(seconds, size, Tier.HOST) for size in sizes]


STAYS, COMES = Work(1.0, 20), Work(1.0, 20, Tier.HOST)
AROUND = Work(0.0, 10, Tier.HOST, 0, 0)
TIMES: dict[str, tuple[list[Work], list[float], float]] = {
    "no work takes no time": ([], [0], 0),
    "what is there is just computed": ([Work(1.0, 100), Work(2.0, 100)], [0], 3),
    # Each copy takes 1 s and each part 2 s: after the first copy all others are hidden.
    "the next weights come while others compute": (hosts(2.0, *[10] * 4), [20], 1 + 4 * 2),
    "a slow link is what it takes": (hosts(0.5, *[10] * 4), [20], 4 * 1 + 0.5),
    "the disk reads ahead of the link": ([Work(0.1, 10, Tier.DISK)] * 3, [30], 3 * 2 + 1 + 0.1),
    # A copy takes 2 s, a part 1 s.
    "what stays gives the others time": ([STAYS, COMES] * 4, [40], 9),
    "beside what stays at once": ([STAYS] * 4 + [COMES] * 4, [40], 10),
    "what fills the window alone comes alone": (hosts(1.0, 10, 30, 5), [20], 7.5),
    "small parts come as many as fit": (hosts(2.0, 30, 10, 10, 10, 30), [60], 13),
    "each device has its own window": (
        [Work(4.0, 10, Tier.HOST, device) for device in (0, 0, 1)], [20, 10], 1 + 3 * 4
    ),
    "a smaller window waits": ([Work(4.0, 10, Tier.HOST, device) for device in (0, 0, 1)], [10, 10], 14),
    "a part around others leaves with the last": (
        [AROUND, *hosts(1.0, 10), Work(1.0, 10, Tier.HOST, 0, 20), *hosts(1.0, 20)], [30], 7
    ),
    "also where what is inside stays": (
        [AROUND, Work(5.0, 0, Tier.DEVICE, 0, 10), *hosts(1.0, 20)], [20], 9
    ),
}  # fmt: skip


@pytest.mark.parametrize(("works", "windows", "seconds"), TIMES.values(), ids=TIMES)
def test_a_forward_takes(works: list[Work], windows: list[float], seconds: float) -> None:
    assert forward_seconds(works, RATES, windows=windows) == pytest.approx(seconds)


works = st.lists(
    st.builds(
        Work,
        st.floats(0, 10),
        st.integers(1, 1000),
        st.sampled_from([Tier.DEVICE, Tier.HOST, Tier.DISK]),
        st.integers(0, 1),
        st.none(),
    ),
    max_size=30,
)
windows = st.tuples(st.integers(0, 4000), st.integers(0, 4000))


@given(works, windows, st.integers(0, 1000))
def test_the_time_is_that_of_the_turns_and_within_its_bounds(
    parts: list[Work], window: tuple[int, int], more: int
) -> None:
    seconds = forward_seconds(parts, RATES, windows=window)
    turns = play(parts, RATES, windows=window)
    assert seconds == pytest.approx(turns[-1].computed[1] if turns else 0.0, rel=1e-9)
    compute = sum(part.compute_seconds for part in parts)
    copy = sum(part.size_bytes for part in parts if part.source is not Tier.DEVICE) / RATES.to_device
    read = sum(part.size_bytes for part in parts if part.source is Tier.DISK) / RATES.from_disk
    assert max(compute, copy, read) <= seconds * (1 + 1e-9) + 1e-9  # the busiest
    assert seconds <= (compute + copy + read) * (1 + 1e-9) + 1e-9  # all in turn
    larger = forward_seconds(parts, RATES, windows=(window[0] + more, window[1]))
    assert larger <= seconds * (1 + 1e-9)


@given(works, windows)
def test_no_window_ever_holds_more_than_it_may(parts: list[Work], window: tuple[int, int]) -> None:
    """Of the turns, which the time is that of."""
    turns = play(parts, RATES, windows=window)
    come = [(turn, part) for turn, part in zip(turns, parts, strict=True) if part.source is not Tier.DEVICE]
    for begun, part in come:
        # Those that have begun to come by then, itself among them, and have not been computed.
        there = [
            other.size_bytes
            for turn, other in come
            if other.device == part.device
            and min(turn.copied[0], turn.read[0] if other.source is Tier.DISK else turn.copied[0])
            <= begun.copied[0]
            and turn.computed[1] > begun.copied[0] + 1e-9
        ]
        assert sum(there) <= max(window[part.device], part.size_bytes) or len(there) == 1
