from collections.abc import Sequence
from itertools import pairwise
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


def seconds_of(turns: Sequence[PartTimes]) -> float:
    return turns[-1].computed[1] if turns else 0.0


def test_what_is_there_is_just_computed() -> None:
    turns = play([Work(1.0, 100), Work(2.0, 100)], RATES, windows=[0])
    assert [turn.computed for turn in turns] == [(0, 1), (1, 3)]
    assert seconds_of(turns) == 3


def test_the_next_weights_come_while_others_compute() -> None:
    # Each copy takes 1 s and each part 2 s: after the first copy all others are hidden.
    turns = play([Work(2.0, 10, Tier.HOST)] * 4, RATES, windows=[20])
    assert seconds_of(turns) == 1 + 4 * 2
    assert [turn.copied for turn in turns] == [(0, 1), (1, 2), (3, 4), (5, 6)]


def test_a_slow_link_is_what_it_takes() -> None:
    assert seconds_of(play([Work(0.5, 10, Tier.HOST)] * 4, RATES, windows=[20])) == 4 * 1 + 0.5


def test_the_disk_reads_ahead_of_the_link() -> None:
    turns = play([Work(0.1, 10, Tier.DISK)] * 3, RATES, windows=[30])
    assert [turn.read for turn in turns] == [(0, 2), (2, 4), (4, 6)]
    assert [turn.copied for turn in turns] == [(2, 3), (4, 5), (6, 7)]


def test_what_stays_gives_the_others_time() -> None:
    # A copy takes 2 s, a part 1 s.
    spread = [Work(1.0, 20, source) for source in (Tier.DEVICE, Tier.HOST) * 4]
    apart = [Work(1.0, 20, source) for source in (Tier.DEVICE,) * 4 + (Tier.HOST,) * 4]
    assert seconds_of(play(spread, RATES, windows=[40])) == 9
    assert seconds_of(play(apart, RATES, windows=[40])) == 10


def test_a_part_that_fills_the_window_alone_comes_alone() -> None:
    turns = play(
        [Work(1.0, 10, Tier.HOST), Work(1.0, 30, Tier.HOST), Work(1.0, 5, Tier.HOST)], RATES, windows=[20]
    )
    assert [turn.copied for turn in turns] == [(0, 1), (2, 5), (6, 6.5)]


def test_small_parts_come_as_many_as_fit() -> None:
    works = [Work(2.0, size, Tier.HOST) for size in (30, 10, 10, 10, 30)]
    turns = play(works, RATES, windows=[60])
    assert [turn.copied[0] for turn in turns] == [0, 3, 4, 5, 6]
    later = play(works, RATES, windows=[59])
    assert [turn.copied[0] for turn in later] == [0, 3, 4, 5, 7]  # when the first two have left


def test_each_device_has_its_own_window() -> None:
    works = [Work(4.0, 10, Tier.HOST, device) for device in (0, 0, 1)]
    copied = [turn.copied for turn in play(works, RATES, windows=[20, 10])]
    assert copied == [(0, 1), (1, 2), (2, 3)]
    assert [turn.copied[0] for turn in play(works, RATES, windows=[10, 10])] == [0, 5, 6]


def test_a_part_around_others_leaves_with_the_last_of_them() -> None:
    around = Work(0.0, 10, Tier.HOST, 0, 0)
    inside = [Work(1.0, 10, Tier.HOST), Work(1.0, 10, Tier.HOST, 0, 20)]
    turns = play([around, *inside, Work(1.0, 20, Tier.HOST)], RATES, windows=[30])
    assert [turn.copied for turn in turns] == [(0, 1), (1, 2), (2, 3), (4, 6)]
    stays = play(
        [Work(0.0, 10, Tier.HOST, 0, 0), Work(5.0, 0, Tier.DEVICE, 0, 10), Work(1.0, 20, Tier.HOST)],
        RATES,
        windows=[20],
    )
    assert stays[2].copied == (6, 8)  # also where what is inside stays


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


@given(works, windows)
def test_nothing_happens_before_its_time(parts: list[Work], window: tuple[int, int]) -> None:
    turns = play(parts, RATES, windows=window)
    for lane in ("read", "copied", "computed"):
        spans = [
            getattr(turn, lane) for turn, part in zip(turns, parts, strict=True) if used(turn, part, lane)
        ]
        assert all(before[1] <= after[0] + 1e-9 for before, after in pairwise(spans))
    for turn, part in zip(turns, parts, strict=True):
        if part.source is Tier.DISK:
            assert turn.read[1] <= turn.copied[0]
        if part.source is not Tier.DEVICE:
            assert turn.copied[1] <= turn.computed[0]


@given(works, windows)
def test_no_window_ever_holds_more_than_it_may(parts: list[Work], window: tuple[int, int]) -> None:
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


@given(works, windows)
def test_it_is_bounded_by_the_busiest_and_by_all_in_turn(parts: list[Work], window: tuple[int, int]) -> None:
    compute = sum(part.compute_seconds for part in parts)
    copy = sum(part.size_bytes for part in parts if part.source is not Tier.DEVICE) / RATES.to_device
    read = sum(part.size_bytes for part in parts if part.source is Tier.DISK) / RATES.from_disk
    seconds = seconds_of(play(parts, RATES, windows=window))
    assert max(compute, copy, read) <= seconds * (1 + 1e-9) + 1e-9
    assert seconds <= (compute + copy + read) * (1 + 1e-9) + 1e-9


@given(works, windows, st.integers(0, 1000))
def test_a_larger_window_never_takes_longer(parts: list[Work], window: tuple[int, int], more: int) -> None:
    larger = (window[0] + more, window[1])
    seconds = seconds_of(play(parts, RATES, windows=larger))
    assert seconds <= seconds_of(play(parts, RATES, windows=window)) * (1 + 1e-9)


@given(works, windows)
def test_the_time_alone_is_that_of_the_turns(parts: list[Work], window: tuple[int, int]) -> None:
    seconds = seconds_of(play(parts, RATES, windows=window))
    assert forward_seconds(parts, RATES, windows=window) == pytest.approx(seconds, rel=1e-9)


def used(turn: PartTimes, part: Work, lane: str) -> bool:
    return lane == "computed" or part.source is Tier.DISK or (part.source is Tier.HOST and lane == "copied")


def test_no_work_takes_no_time() -> None:
    assert seconds_of(play([], RATES, windows=[0])) == 0
