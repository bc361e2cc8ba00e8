import math

from hypothesis import given
from hypothesis import strategies as st

from drivetrain_memory.tracker.sample_recorder import SampleRing
from drivetrain_memory.tracker.timeline import Timeline, TimelineBuilder

numbers = st.one_of(st.just(math.nan), st.floats(0, 1e15))
samples = st.lists(
    st.tuples(st.floats(0, 1000), numbers, numbers, st.sampled_from(["", "forward", "a/b"])), max_size=60
)


def most(values: list[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return max(known) if known else math.nan


@given(taken=samples, num_buckets=st.sampled_from([2, 4, 16]))
def test_no_maximum_is_lost_however_long_the_run(
    taken: list[tuple[float, float, float, str]], num_buckets: int
) -> None:
    builder = TimelineBuilder(("a", "b"), bucket_seconds=0.1, num_buckets=num_buckets)
    for seconds, first, second, phase in sorted(taken):
        builder.add(seconds, (first, second), phase)
    built = builder.build()
    for name, column in (("a", 1), ("b", 2)):
        expected = most([sample[column] for sample in taken])
        assert len(built.values[name]) <= num_buckets
        assert most(list(built.values[name])) == expected or math.isnan(expected)
    for seconds, first, _, phase in taken:
        index = int(seconds / built.bucket_seconds)
        assert math.isnan(first) or built.values["a"][index] >= first
        assert not phase or built.phases[index][phase] > 0
    assert all(sum(shares.values()) <= 1.0000001 for shares in built.phases)
    again = Timeline.from_json(built.to_json())
    assert again.to_json() == built.to_json()


@given(rows=st.lists(st.tuples(st.floats(), st.floats()), max_size=30), size=st.integers(1, 10))
def test_a_ring_keeps_the_newest_rows(rows: list[tuple[float, float]], size: int) -> None:
    ring = SampleRing(2, size)
    for row in rows:
        ring.add(row)
    assert len(ring) == min(len(rows), size)
    assert repr(list(ring)) == repr(rows[-size:])  # NaN differs from itself
