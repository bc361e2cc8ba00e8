import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain_plan.choice import PlanChoice
from drivetrain_plan.program.figures import StepFigures
from drivetrain_plan.search.memory import DeviceMemory, divided_by_stage, memory_of

GB = 10**9
STAGES = ("zero1", "zero2", "zero3")
STEP = StepFigures(
    weights=8 * GB,
    gradients=8 * GB,
    states=16 * GB,
    activations=4 * GB,
    forward=5 * GB,
    early=5 * GB,
    late=9 * GB,
    computing=5 * GB,
    stepping=16 * GB,
)


def memory(strategy: str, num_ranks: int = 8) -> DeviceMemory:
    choice = PlanChoice(shard=num_ranks, strategy=strategy)
    return memory_of(choice, divided_by_stage(choice, STEP, GB / 4))


def test_the_parts_add_up_to_the_peak_of_the_phase_that_holds_the_most() -> None:
    found = memory_of(PlanChoice(), STEP)
    assert found.peak == STEP.peak == 40 * GB
    assert (found.gradients, found.activations, found.temporary) == (8 * GB, 0, 8 * GB)


def test_replicas_keep_buckets_of_gradients_while_they_compute() -> None:
    step = STEP.changed(stepping=8 * GB)
    assert memory_of(PlanChoice(data=8), step).peak == memory_of(PlanChoice(), step).peak + 4 * GB


def test_a_host_that_keeps_the_weights_leaves_the_phase_that_then_holds_the_most() -> None:
    step = StepFigures(weights=50, gradients=100, states=100, forward=80, early=190, late=200, stepping=210)
    found = memory_of(PlanChoice(shard=4, strategy="full_shard", offload="host"), step)
    assert (found.peak, found.weights, found.gradients, found.states) == (190, 0, 0, 0)


def test_a_host_keeps_no_gradients_that_micro_batches_add_up() -> None:
    choice = PlanChoice(shard=4, strategy="full_shard", offload="host", accumulation=4)
    assert memory_of(choice, STEP).peak == STEP.computing + 4 * STEP.gradients


def test_the_more_is_divided_the_less_a_rank_holds() -> None:
    peaks = [memory(stage).peak for stage in STAGES]
    assert STEP.peak > peaks[0] > peaks[1] > peaks[2]


def test_stage_3_holds_a_part_and_two_gathered_blocks_with_the_gradients_of_one() -> None:
    found = memory("zero3")
    assert (found.weights, found.states) == (GB, 2 * GB)
    assert found.peak == 3 * GB + max(STEP.computing + 3 * GB / 4, STEP.late - 7 * GB + 3 * GB / 4)


@pytest.mark.parametrize("strategy", STAGES)
@given(num_ranks=st.integers(2, 4096))
def test_more_ranks_never_need_more_each(strategy: str, num_ranks: int) -> None:
    assert memory(strategy, num_ranks + 1).peak <= memory(strategy, num_ranks).peak * (1 + 1e-9)
