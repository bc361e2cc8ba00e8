from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from drivetrain_dispatch.timeline import Rates, Turn, Work, forward_seconds, play, seconds_of

RATES = Rates(to_device=10.0, from_disk=5.0)


def test_what_is_there_is_just_computed() -> None:
    turns = play([Work(1.0, 100), Work(2.0, 100)], RATES, depth=1)
    assert [turn.computed for turn in turns] == [(0, 1), (1, 3)]
    assert seconds_of(turns) == 3


def test_the_next_weights_come_while_others_compute() -> None:
    # Each copy takes 1 s and each part 2 s: after the first copy all others are hidden.
    turns = play([Work(2.0, 10, "host")] * 4, RATES, depth=1)
    assert seconds_of(turns) == 1 + 4 * 2
    assert [turn.copied for turn in turns] == [(0, 1), (1, 2), (3, 4), (5, 6)]


def test_a_slow_link_is_what_it_takes() -> None:
    assert seconds_of(play([Work(0.5, 10, "host")] * 4, RATES, depth=1)) == 4 * 1 + 0.5


def test_the_disk_reads_ahead_of_the_link() -> None:
    turns = play([Work(0.1, 10, "disk")] * 3, RATES, depth=2)
    assert [turn.read for turn in turns] == [(0, 2), (2, 4), (4, 6)]
    assert [turn.copied for turn in turns] == [(2, 3), (4, 5), (6, 7)]


def test_what_stays_gives_the_others_time() -> None:
    # A copy takes 2 s, a part 1 s.
    spread = [Work(1.0, 20, source) for source in ("device", "host") * 4]
    apart = [Work(1.0, 20, source) for source in ("device",) * 4 + ("host",) * 4]
    assert seconds_of(play(spread, RATES, depth=1)) == 9
    assert seconds_of(play(apart, RATES, depth=1)) == 10


works = st.lists(
    st.builds(
        Work,
        st.floats(0, 10),
        st.integers(0, 1000),
        st.sampled_from(["device", "host", "disk"]),
    ),
    max_size=30,
)


@given(works, st.integers(0, 5))
def test_nothing_happens_before_its_time(parts: list[Work], depth: int) -> None:
    turns = play(parts, RATES, depth=depth)
    for lane in ("read", "copied", "computed"):
        spans = [
            getattr(turn, lane) for turn, part in zip(turns, parts, strict=True) if used(turn, part, lane)
        ]
        assert all(before[1] <= after[0] for before, after in pairwise(spans))
    offloaded = [turn for turn, part in zip(turns, parts, strict=True) if part.source != "device"]
    for turn, part in zip(turns, parts, strict=True):
        if part.source == "disk":
            assert turn.read[1] <= turn.copied[0]
        if part.source != "device":
            assert turn.copied[1] <= turn.computed[0]
    for before, after in zip(offloaded, offloaded[depth + 1 :], strict=False):
        assert before.computed[1] <= after.copied[0]


@given(works, st.integers(0, 5))
def test_it_is_bounded_by_the_busiest_and_by_all_in_turn(parts: list[Work], depth: int) -> None:
    compute = sum(part.compute_seconds for part in parts)
    copy = sum(part.size_bytes for part in parts if part.source != "device") / RATES.to_device
    read = sum(part.size_bytes for part in parts if part.source == "disk") / RATES.from_disk
    seconds = seconds_of(play(parts, RATES, depth=depth))
    assert max(compute, copy, read) <= seconds * (1 + 1e-9)
    assert seconds <= (compute + copy + read) * (1 + 1e-9) + 1e-9


@given(works, st.integers(0, 5))
def test_to_look_further_ahead_never_takes_longer(parts: list[Work], depth: int) -> None:
    assert seconds_of(play(parts, RATES, depth=depth + 1)) <= seconds_of(play(parts, RATES, depth=depth))


@given(works, st.integers(0, 5))
def test_the_time_alone_is_that_of_the_turns(parts: list[Work], depth: int) -> None:
    assert forward_seconds(parts, RATES, depth=depth) == seconds_of(play(parts, RATES, depth=depth))


def used(turn: Turn, part: Work, lane: str) -> bool:
    return lane == "computed" or part.source == "disk" or (part.source == "host" and lane == "copied")


def test_no_work_takes_no_time() -> None:
    assert seconds_of(play([], RATES, depth=1)) == 0
