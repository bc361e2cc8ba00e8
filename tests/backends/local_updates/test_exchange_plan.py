from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain_backends.local_updates.exchange_plan import ExchangePlan, in_fragments


@given(fragments=st.integers(1, 5), period=st.integers(1, 6), data=st.data())
def test_each_fragment_is_exchanged_every_so_many_steps_one_at_a_time(
    fragments: int, period: int, data: st.DataObject
) -> None:
    every = fragments * period
    plan = ExchangePlan(every=every, fragments=fragments, delay=data.draw(st.integers(0, period - 1)))
    begun = {step: plan.begins(step) for step in range(1, 4 * every + 1)}
    for fragment in range(fragments):
        steps = [step for step, found in begun.items() if found == fragment]
        assert steps == list(range(period * (fragment + 1), 4 * every + 1, every))
        assert all(plan.ends(step + plan.delay) == fragment for step in steps)
    under_way = [step for step in begun if begun[step] is not None]
    assert all(later - earlier > plan.delay for earlier, later in pairwise(under_way))


@given(sizes=st.lists(st.integers(1, 100), min_size=1, max_size=30), data=st.data())
def test_fragments_hold_every_tensor_once(sizes: list[int], data: st.DataObject) -> None:
    number = data.draw(st.integers(1, len(sizes)))
    parts = in_fragments(sizes, number)
    assert [place for part in parts for place in part] == list(range(len(sizes)))
    assert all(parts)
    assert max(sum(sizes[place] for place in part) for part in parts) <= sum(sizes) / number + max(sizes)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"every": 0}, "every=0: a number of 1 or more"),
        ({"every": 2.5}, r"every=2\.5: a number of 1 or more"),
        ({"every": 10, "fragments": 4}, "say every=12"),
        (
            {"every": 4, "fragments": 2, "delay": 2},
            "delay=2: an exchange begins every 2 steps.*say 1 at most",
        ),
        ({"every": 1, "delay": -1}, "delay=-1: a number of 0 or more"),
        ({"every": 4, "delay": 1, "local_share": 1.0}, r"local_share=1\.0: a share"),
    ],
)
def test_numbers_that_cannot_be_kept_are_refused(said: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ExchangePlan(**said)


def test_more_fragments_than_tensors_are_refused() -> None:
    with pytest.raises(ValueError, match="fragments=3: the model trains 2 tensors"):
        in_fragments([4, 4], 3)
