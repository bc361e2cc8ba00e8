import pytest

from drivetrain_plan.choice import PlanChoice
from drivetrain_plan.search.step_time import seconds_of, spread


@pytest.mark.parametrize(
    ("view", "found"),
    [
        ("tensor", (2, True)),
        ("context", (2, True)),
        ("shard", (2, True)),
        ("fsdp", (4, True)),
        ("data", (4, False)),
        ("counts", (16, False)),
        ("pipeline", (1, True)),
    ],
)
def test_a_view_spans_hosts_where_its_ranks_do(view: str, found: tuple[int, bool]) -> None:
    choice = PlanChoice(data=4, shard=2, context=2, tensor=2, strategy="full_shard")
    assert spread(choice, view, 8) == found  # type: ignore[arg-type]


def test_a_sum_passes_twice_and_a_gather_once() -> None:
    gather = seconds_of("all_gather", 1e9, 0, 4, 1e9, 0)
    assert gather == pytest.approx(0.75)
    assert seconds_of("all_reduce", 1e9, 0, 4, 1e9, 0) == 2 * gather
    assert seconds_of("all_reduce", 1e9, 1, 1, 1e9, 1) == 0  # one rank sends nothing
    assert seconds_of("all_gather", 0, 3, 8, 1e9, 1e-5) == pytest.approx(9e-5)
