"""Megatron's groups hold the ranks of the mesh, rank by rank, for as long as the backend lives."""

import pytest
import torch.distributed as dist

from drivetrain_backends import AccumulationWindow
from drivetrain_megatron import MegatronBackend, megatron_from_transformers
from drivetrain_megatron.compat import own_groups
from drivetrain_megatron.groups import (
    check_axes,
    check_same_groups,
    close_parallel_state,
    open_parallel_state,
)
from drivetrain_megatron.library import parallel_state
from drivetrain_precision import choose_policy
from drivetrain_state import ParallelDims
from megatron_models import model_of
from plain_loop.backends import context


@pytest.mark.ranks(4, timeout_seconds=100)
@pytest.mark.parametrize(
    "sizes",
    [
        {"tensor": 2},
        {"tensor": 4},
        {"pipeline": 2},
        {"pipeline": 2, "tensor": 2},
        {"pipeline": 4},
        {"data": 4},
    ],
    ids=str,
)
def test_groups_hold_the_ranks_of_the_mesh(sizes: dict[str, int]) -> None:
    with context(parallelism=ParallelDims(**sizes)) as where:
        before = len(dist.distributed_c10d._world.pg_map)
        open_parallel_state(where)
        made = own_groups()
        open_parallel_state(where)  # what is there is taken as it is
        assert own_groups() == made
        names = {"tensor": "tensor_model", "reads": "data", "pipeline": "pipeline_model"}
        for view, name in names.items():
            group = getattr(parallel_state, f"get_{name}_parallel_group")()
            rank = getattr(parallel_state, f"get_{name}_parallel_rank")()
            assert tuple(dist.get_process_group_ranks(group)) == where.ranks(view).ranks
            assert rank == where.ranks(view).index
        close_parallel_state()
        assert not parallel_state.is_initialized()
        assert len(dist.distributed_c10d._world.pg_map) == before
        close_parallel_state()  # once more does nothing


@pytest.mark.ranks(4, timeout_seconds=100)
def test_groups_of_another_mesh_are_refused() -> None:
    with context(parallelism=ParallelDims(tensor=2)) as where:
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=4)
        dist.barrier()  # all are connected before one destroys its groups
        with pytest.raises(
            RuntimeError, match=r"\[0, 1, 2, 3\] along 'tensor', and the mesh .*close the Accelerator"
        ):
            check_same_groups(where)
        close_parallel_state()


@pytest.mark.ranks(2, timeout_seconds=100)
@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"shard": 2}, "parallel.shard=2 under backend='megatron': .* say data in its place"),
        ({"context": 2}, "parallel.context=2 .*Transformer Engine"),
        ({"tensor": 2, "expert": 2}, "parallel.expert=2 .*divided by tensor alone"),
    ],
    ids=["shard", "context", "expert"],
)
def test_axes_that_divide_nothing_here_are_refused(sizes: dict[str, int], message: str) -> None:
    with context(parallelism=ParallelDims(**sizes)) as where, pytest.raises(ValueError, match=message):
        check_axes(where)


@pytest.mark.ranks(1)
def test_the_state_lives_as_long_as_the_mesh_for_one_backend_or_two() -> None:
    with pytest.raises(RuntimeError, match=r"before Accelerator\(backend='megatron'\)"):
        megatron_from_transformers(model_of("llama"))
    with context() as where:
        policy = choose_policy("no", where.device)
        first, second = (MegatronBackend(where, policy, window=AccumulationWindow(1)) for _ in range(2))
        assert parallel_state.is_initialized()
        first.close()
        second.close()
        assert parallel_state.is_initialized()
    assert not parallel_state.is_initialized()
