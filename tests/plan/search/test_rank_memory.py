import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain_plan.program.step_memory import StepMemory
from drivetrain_plan.search.rank_memory import SHARDINGS, memory_of_rank

GB = 10**9
STEP = StepMemory(
    weights=8 * GB,
    gradients=8 * GB,
    optimizer_states=16 * GB,
    activations=4 * GB,
    computing=5 * GB,
    stepping=8 * GB,
    peak=40 * GB,
)


def peak(sharding: str, world_size: int = 8) -> int:
    return memory_of_rank(
        STEP, sharding=SHARDINGS[sharding], world_size=world_size, largest_block_bytes=GB // 4
    ).peak


@pytest.mark.parametrize("sharding", list(SHARDINGS))
def test_one_process_holds_all(sharding: str) -> None:
    assert peak(sharding, 1) == STEP.peak


def test_the_more_is_divided_the_less_a_rank_holds() -> None:
    assert peak("ddp") == STEP.peak > peak("zero1") > peak("zero2") > peak("zero3") == peak("fsdp")


def test_fsdp_holds_a_part_and_two_gathered_blocks_with_the_gradients_of_one() -> None:
    rank = memory_of_rank(STEP, sharding=SHARDINGS["fsdp"], world_size=8, largest_block_bytes=GB // 4)
    assert (rank.weights, rank.gradients, rank.optimizer_states) == (GB, GB, 2 * GB)
    assert rank.gathered == 3 * GB // 4
    assert rank.peak == 4 * GB + rank.gathered + STEP.computing


@given(world_size=st.integers(2, 4096), sharding=st.sampled_from(list(SHARDINGS)))
def test_more_ranks_never_need_more_each(world_size: int, sharding: str) -> None:
    assert peak(sharding, world_size + 1) <= peak(sharding, world_size)
