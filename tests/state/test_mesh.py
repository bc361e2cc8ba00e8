from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain_state import MeshPlan, ParallelDims, StateSettings, connect

AXES = ("pipeline", "data", "shard", "context", "tensor")
sizes = st.dictionaries(st.sampled_from(AXES), st.integers(1, 4))


@pytest.mark.parametrize(
    ("said", "world_size", "planned"),
    [
        ({}, 8, {"data": 8}),
        ({"tensor": 2}, 8, {"data": 4, "tensor": 2}),
        ({"shard": 8}, 8, {"shard": 8}),  # unsaid data of one stays out
        ({"data": 2, "shard": -1}, 8, {"data": 2, "shard": 4}),
        ({"shard": -1}, 1, {"shard": 1}),  # an axis that was said stands in the mesh with size one
    ],
)
def test_what_is_not_said_is_what_is_left(
    said: dict[str, int], world_size: int, planned: dict[str, int]
) -> None:
    expected = MeshPlan(names=tuple(planned), sizes=tuple(planned.values()))
    assert ParallelDims(**said).plan(world_size) == expected


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"data": 2, "tensor": 3}, "data=2 x tensor=3 makes 6, but there are world_size=8"),
        ({"tensor": 3}, "tensor=3 makes 3, which does not divide world_size=8"),
        ({"tensor": 16}, "tensor=16 makes 16, which does not divide world_size=8"),
        ({"tensor": 0}, "^tensor=0: "),
        ({"tensor": -2}, "^tensor=-2: "),
        ({"data": -1, "shard": -1}, "data=-1 and shard=-1: only one"),
    ],
)
def test_sizes_that_fit_no_world_are_refused(said: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ParallelDims(**said).plan(8)


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
