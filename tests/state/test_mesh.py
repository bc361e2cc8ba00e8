import time
from dataclasses import replace
from math import prod

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from drivetrain_state import (
    CollectiveMismatchError,
    MeshPlan,
    ParallelDims,
    StateSettings,
    broadcast,
    connect,
    gather,
    gather_object,
    reduce,
)
from drivetrain_state.mesh import AXES, VIEWS, View

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
        ({"expert": -1}, "^expert=-1: "),
        (
            {"shard": 2, "tensor": 2, "expert": 3},
            "shard=2 x context=1 x tensor=2: .*these 4 processes; expert may be 1, 2, 4$",
        ),
        (
            {"data": 8, "expert": 2},
            "not among those of data: say shard in place of data, under a backend that shards$",
        ),
        (
            {"shard": 4, "expert": 3},
            "shard=4 x context=1 x tensor=1: .*these 4 processes; expert may be 1, 2, 4$",
        ),
    ],
)
def test_sizes_that_fit_no_world_are_refused(said: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ParallelDims(**said).plan(8)


def test_an_axis_that_a_backend_lacks_is_refused_with_what_to_do() -> None:
    refused = {"tensor": "leave it out", "expert": "say shard"}
    with pytest.raises(ValueError, match=r"^expert=2 under backend='x': say shard$"):
        ParallelDims(shard=2, tensor=1, expert=2).check_axes("x", refused)
    ParallelDims(shard=2, tensor=-1).check_axes("x", refused)


@given(sizes, st.integers(1, 3))
def test_plans_cover_the_world_and_number_the_data_shards(said: dict[str, int], more: int) -> None:
    world_size = prod(said.values()) * (1 if "data" in said else more)
    plan = ParallelDims(**said).plan(world_size)
    assert prod(plan.sizes) == world_size
    places = [plan.coordinate(rank) for rank in range(world_size)]
    assert len({tuple(place.items()) for place in places}) == world_size
    count = plan.size("data") * plan.size("shard")
    readers = plan.members(0, "reads")
    assert len(readers) == count
    beside = [plan.members(rank, "replica") for rank in readers]
    assert sorted(rank for ranks in beside for rank in ranks) == list(range(world_size))


@given(sizes)
def test_the_ranks_of_a_view_differ_along_its_axes_alone(said: dict[str, int]) -> None:
    plan = ParallelDims(**said).plan(prod(said.values()))
    places = [plan.coordinate(rank) for rank in range(prod(plan.sizes))]
    for view, axes in {**VIEWS, **{name: (name,) for name in AXES}}.items():
        for rank, place in enumerate(places):
            others = {name: at for name, at in place.items() if name not in axes}
            expected = [r for r, p in enumerate(places) if others.items() <= p.items()]
            assert list(plan.members(rank, view)) == expected
        assert sorted(rank for part in plan.parts(view) for rank in part) == list(range(len(places)))


def test_experts_divide_the_ranks_of_a_replica_anew() -> None:
    plan = ParallelDims(data=2, shard=2, tensor=2, expert=2).plan(8)
    assert [list(plan.members(rank, "expert")) for rank in (0, 1, 6)] == [[0, 1], [0, 1], [6, 7]]
    assert [list(plan.members(rank, "expert_shard")) for rank in (0, 1, 6)] == [[0, 2], [1, 3], [4, 6]]
    wide = ParallelDims(shard=2, tensor=2, expert=4).plan(4)
    assert list(wide.members(3, "expert")) == [0, 1, 2, 3]
    assert list(wide.members(3, "expert_shard")) == [3]


def test_a_view_of_ten_thousand_ranks_is_arithmetic() -> None:
    plan = ParallelDims(pipeline=8, data=16, shard=20, tensor=4).plan(10_240)
    assert list(plan.members(10_239, "tensor")) == [10_236, 10_237, 10_238, 10_239]
    assert len(plan.members(10_239, "reads")) == 320


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


def _sums_of_views() -> dict[View, object]:
    settings = StateSettings(device="cpu", watchdog=False, debug=True)
    with connect(settings, parallelism=ParallelDims(data=2, tensor=2)) as context:
        rank = context.topology.rank
        views: list[View] = ["counts", "replica", "data", "tensor", "world", "pipeline"]
        found: dict[View, object] = {}
        for view in views:
            total = reduce(context, torch.tensor(1 + rank), over=view)
            assert gather_object(context, rank, over=view) == list(context.ranks(view).ranks)
            found[view] = total.item()
        sent = broadcast(context, torch.tensor(rank), src=1, over="reads")
        assert sent.item() == context.ranks("reads").ranks[1]
        with pytest.raises(ValueError, match="src=2 with reads=2"):
            broadcast(context, torch.tensor(rank), src=2, over="reads")
        return found


def _remade_groups() -> list[float]:
    """Make, end and make groups of a view, with ranks that come late and a group of the program's own."""
    settings = StateSettings(device="cpu", watchdog=False, timeout_seconds=20)
    found: list[float] = []
    for _ in range(2):
        with connect(settings, parallelism=ParallelDims(data=2, tensor=2)) as context:
            rank = context.topology.rank
            own = dist.new_group([0])
            for _ in range(3):
                group = context.ranks("replica").new_group(backend="gloo")
                time.sleep(0.2 * (rank % 2))
                total = torch.ones(1) * rank
                dist.all_reduce(total, group=group)
                found.append(total.item())
                dist.destroy_process_group(group)
            if rank == 0:
                dist.destroy_process_group(own)
            found.append(reduce(context, torch.tensor(float(rank)), over="reads").item())
    return found


def test_groups_of_a_view_are_made_again(run_ranks) -> None:
    by_rank = run_ranks(_remade_groups, num_processes=4)
    expected = {0: (1, 2), 1: (1, 4), 2: (5, 2), 3: (5, 4)}
    assert by_rank == [[float(each) for each in ([a] * 3 + [b]) * 2] for a, b in expected.values()]


def _what_is_refused() -> list[str]:
    settings = StateSettings(device="cpu", watchdog=False)
    found: list[str] = []
    context = connect(settings, parallelism=ParallelDims(data=2, tensor=2))
    with pytest.raises(ValueError, match="'count' is no view of the mesh: world, reads, counts") as unknown:
        reduce(context, torch.ones(1), over="count")  # pyright: ignore[reportArgumentType]
    found.append(str(unknown.value))
    rows = torch.ones(2, 1 + context.topology.rank // 2)
    with pytest.raises(CollectiveMismatchError) as uneven:
        gather(context, rows, uneven=True, over="reads")
    found.append(str(uneven.value))
    context.close()
    context = connect(replace(settings, debug=True), parallelism=ParallelDims(data=2, tensor=2))
    own = torch.ones(1 + (context.topology.rank == 3))
    if context.topology.rank < 2:  # whose calls are alike
        found.append(str(reduce(context, own, over="tensor").item()))
    else:
        with pytest.raises(CollectiveMismatchError) as differing:
            reduce(context, own, over="tensor")
        found.append(str(differing.value))
    context.close()
    return found


LOST = """
import torch.distributed as dist
from drivetrain_state import ConnectError, ParallelDims, connect

context = connect(device="cpu", parallelism=ParallelDims(tensor=2))
assert dist.get_world_size(context.ranks("reads").process_group) == 1
dist.destroy_process_group()
try:
    context.ranks("reads").process_group
except ConnectError as error:
    print(error)
context.close()  # the view's group has ended with the default one
"""


def test_a_view_whose_group_has_ended_says_so_and_the_context_closes(run_ranks_script) -> None:
    for done in run_ranks_script(LOST):
        assert (done.returncode, done.stderr) == (0, "")
        assert "the process group has ended" in done.stdout


def test_an_unknown_view_and_the_ranks_of_other_sizes_are_named(run_ranks) -> None:
    by_rank = run_ranks(_what_is_refused, num_processes=4)
    assert "rank 0: (2, 1); rank 2: (2, 2)" in by_rank[0][1]
    assert "rank 1: (2, 1); rank 3: (2, 2)" in by_rank[3][1]
    assert [found[2] for found in by_rank[:2]] == ["2.0", "2.0"]
    for found in by_rank[2:]:  # debug mode compares along the axis alone
        said = ": reduce(op='sum') of data: float32 "
        assert f"  rank 2{said}(1,)\n  rank 3{said}(2,)\n" in found[2]
        assert "rank 0" not in found[2]


def test_collectives_run_over_the_ranks_of_a_view(run_ranks) -> None:
    by_rank = run_ranks(_sums_of_views, num_processes=4)
    assert [found["counts"] for found in by_rank] == [4, 6, 4, 6]
    assert [found["data"] for found in by_rank] == [4, 6, 4, 6]
    assert [found["replica"] for found in by_rank] == [3, 3, 7, 7]
    assert [found["tensor"] for found in by_rank] == [3, 3, 7, 7]
    assert [found["world"] for found in by_rank] == [10] * 4
    assert [found["pipeline"] for found in by_rank] == [1, 2, 3, 4]


def test_sequences_are_divided_by_one_of_two_dimensions() -> None:
    with pytest.raises(ValueError, match=r"sequence=True with context=2: .* leave sequence out"):
        ParallelDims(context=2, tensor=2, sequence=True)
    with pytest.raises(TypeError, match="context='2': a size is a whole number"):
        ParallelDims(context="2")  # type: ignore[arg-type]
