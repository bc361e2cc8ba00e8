from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain_state import MeshPlan, ParallelDims, StateSettings, connect

AXES = ("pipeline", "data", "shard", "context", "tensor")
sizes = st.dictionaries(st.sampled_from(AXES), st.integers(1, 4))


def test_nothing_said_is_data_parallel() -> None:
    assert ParallelDims().plan(8) == MeshPlan(names=("data",), sizes=(8,))


def test_unsaid_data_takes_what_is_left() -> None:
    assert ParallelDims(tensor=2).plan(8) == MeshPlan(names=("data", "tensor"), sizes=(4, 2))


def test_unsaid_data_of_one_stays_out() -> None:
    assert ParallelDims(shard=8).plan(8) == MeshPlan(names=("shard",), sizes=(8,))


def test_minus_one_takes_what_is_left() -> None:
    assert ParallelDims(data=2, shard=-1).plan(8) == MeshPlan(names=("data", "shard"), sizes=(2, 4))


def test_an_axis_that_was_said_stands_in_the_mesh_with_size_one() -> None:
    assert ParallelDims(shard=-1).plan(1) == MeshPlan(names=("shard",), sizes=(1,))


def test_a_wrong_product_names_both() -> None:
    with pytest.raises(ValueError, match="data=2 x tensor=3 makes 6, but there are world_size=8"):
        ParallelDims(data=2, tensor=3).plan(8)


def test_a_product_that_does_not_divide_names_both() -> None:
    with pytest.raises(ValueError, match="tensor=3 makes 3, which does not divide world_size=8"):
        ParallelDims(tensor=3).plan(8)


def test_more_processes_wanted_than_there_are() -> None:
    with pytest.raises(ValueError, match="tensor=4 makes 4, which does not divide world_size=2"):
        ParallelDims(tensor=4).plan(2)


@pytest.mark.parametrize("size", [0, -2])
def test_a_size_below_one_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"^tensor={size}: "):
        ParallelDims(tensor=size)


def test_only_one_size_may_be_the_rest() -> None:
    with pytest.raises(ValueError, match="data=-1 and shard=-1: only one"):
        ParallelDims(data=-1, shard=-1)


@given(sizes, st.integers(1, 3))
def test_plans_cover_the_world_and_number_the_data_shards(said: dict[str, int], more: int) -> None:
    world_size = prod(said.values()) * (1 if "data" in said else more)
    plan = ParallelDims(**said).plan(world_size)
    assert prod(plan.sizes) == world_size
    places = [plan.coordinate(rank) for rank in range(world_size)]
    assert len({tuple(place.items()) for place in places}) == world_size
    count = plan.size("data") * plan.size("shard")
    shards = [plan.data_shard(rank) for rank in range(world_size)]
    assert {of for _, of in shards} == {count}
    for index in range(count):
        assert sum(shard == index for shard, _ in shards) == world_size // count
    assert list(plan.data_readers()) == [shards.index((index, count)) for index in range(count)]


def _mesh_of_rank() -> tuple[object, ...]:
    settings = StateSettings(device="cpu", watchdog=False)
    with connect(settings, parallelism=ParallelDims(data=2, tensor=2)) as context:
        assert context.mesh is not None
        plan = ParallelDims(data=2, tensor=2).plan(4)
        where = plan.coordinate(context.topology.rank)
        assert list(context.mesh.get_coordinate() or ()) == [where["data"], where["tensor"]]
        return context.mesh.mesh_dim_names, context.mesh["tensor"].mesh.tolist()


def test_the_device_mesh_is_the_planned_one(run_ranks) -> None:
    assert run_ranks(_mesh_of_rank, num_processes=4) == [
        (("data", "tensor"), [0, 1]),
        (("data", "tensor"), [0, 1]),
        (("data", "tensor"), [2, 3]),
        (("data", "tensor"), [2, 3]),
    ]
