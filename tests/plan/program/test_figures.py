from hypothesis import given
from hypothesis import strategies as st

from drivetrain_plan.program.figures import StepFigures, extrapolate

NUMBERS = st.integers(0, 10**6)


@given(st.tuples(NUMBERS, NUMBERS), NUMBERS, NUMBERS)
def test_what_grows_with_each_make_of_blocks_is_extrapolated(
    a_block: tuple[int, int], rest: int, count: int
) -> None:
    def of(first: int, second: int) -> StepFigures:
        payloads = {("tensor", "all_reduce"): float(first)}
        return StepFigures(weights=rest + a_block[0] * first + a_block[1] * second, payloads=payloads)

    found = extrapolate(of(2, 2), [of(3, 2), of(2, 3)], wanted=[count, 3])
    assert found.weights == rest + a_block[0] * (2 + count) + a_block[1] * 5
    assert found.payloads == {("tensor", "all_reduce"): 2 + count}


def test_figures_without_a_collective_count_none() -> None:
    sums = StepFigures(calls={("fsdp", "all_gather"): 2.0})
    assert StepFigures().plus(sums, times=3).calls == {("fsdp", "all_gather"): 6.0}
    assert sums.plus(StepFigures()).calls == sums.calls
