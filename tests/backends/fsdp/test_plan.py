"""Which ranks share a replica, and in which dtypes its tensors are: planned, or refused with both sides."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drivetrain_backends import FSDPSettings
from drivetrain_backends.fsdp.plan import DtypePlan, plan_dtypes, plan_mesh
from drivetrain_precision import PrecisionError, PrecisionSettings, choose_policy
from drivetrain_state import ParallelDims, Topology


def topology(world_size: int, local_world_size: int | None = None) -> Topology:
    return Topology(world_size=world_size, local_world_size=local_world_size or world_size)


@pytest.mark.parametrize(
    ("strategy", "sizes", "reshards"),
    [
        ("full_shard", (8,), True),
        ("shard_grad_op", (8,), False),
        ("hybrid_shard", (2, 4), True),
        ("no_shard", (8, 1), False),
    ],
)
def test_each_strategy_divides_the_ranks(strategy: str, sizes: tuple[int, ...], reshards: bool) -> None:
    shape = plan_mesh(FSDPSettings(strategy=strategy), topology(8, 4))
    assert (shape.sizes, shape.reshards) == (sizes, reshards)


@given(world=st.integers(1, 10_000), size=st.integers(1, 100))
def test_a_size_that_does_not_divide_the_ranks_names_both_numbers(world: int, size: int) -> None:
    settings = FSDPSettings(strategy="hybrid_shard", shard_size=size)
    if world % size:
        with pytest.raises(
            ValueError,
            match=rf"fsdp.shard_size={size} with {world} processes to divide: .* is \d+, not {world}",
        ):
            plan_mesh(settings, topology(world))
    else:
        assert plan_mesh(settings, topology(world)).sizes == (world // size, size)


def test_a_size_alone_asks_for_hybrid_sharding() -> None:
    assert plan_mesh(FSDPSettings(shard_size=2), topology(4)).strategy == "hybrid_shard"


def test_the_runs_mesh_is_taken_where_no_strategy_is_said() -> None:
    for said, sizes in (
        ({"data": 4, "shard": 2}, (4, 2)),
        ({"shard": 8}, (8,)),
        ({"data": 8}, (8,)),
        ({"data": 4, "tensor": 2}, (4,)),  # along the other axes the shards are copies
        ({"pipeline": 2, "data": 2, "shard": 2}, (2, 2)),
        ({"shard": 2, "context": 2, "tensor": 2}, (4,)),
    ):
        assert plan_mesh(FSDPSettings(), topology(8), ParallelDims(**said).plan(8)).sizes == sizes
    hybrid = FSDPSettings(strategy="hybrid_shard")
    assert plan_mesh(hybrid, topology(8, 4), ParallelDims(tensor=2).plan(8)).sizes == (2, 2)


def test_a_strategy_that_contradicts_the_runs_mesh_names_both() -> None:
    with pytest.raises(
        ValueError, match=r"strategy='full_shard' makes 1 replicas of 8 shards, .* data=4 and shard=2"
    ):
        plan_mesh(FSDPSettings(strategy="full_shard"), topology(8), ParallelDims(data=4, shard=2).plan(8))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"shard_size": 0}, "shard_size=0: must be at least 1"),
        ({"prefetch": -1}, "prefetch=-1: must be at least 0"),
        ({"shard_size": 2, "strategy": "no_shard"}, "shard_size=2 with strategy='no_shard'"),
        ({"wrap": ("A",), "min_num_params": 1}, "give one of the two"),
        ({"pin_memory": True}, "pin_memory=True: nothing is offloaded"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(options: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        FSDPSettings(**options)


CPU = torch.device("cpu")


def planned(mode: str, settings: FSDPSettings | None = None, **dtypes: str) -> DtypePlan:
    return plan_dtypes(settings or FSDPSettings(), choose_policy(mode, CPU, PrecisionSettings(**dtypes)))


@pytest.mark.parametrize(("mode", "computed"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_half_precision_computes_in_half_and_reduces_in_fp32(mode: str, computed: torch.dtype) -> None:
    plan = planned(mode)
    assert (plan.compute, plan.reduce, plan.upcast) == (computed, torch.float32, True)


def test_without_mixed_precision_the_models_dtypes_stay() -> None:
    plan = planned("no")
    assert (plan.compute, plan.reduce, plan.upcast) == (None, None, False)


def test_weights_held_in_bf16_are_not_upcast_and_are_reduced_in_fp32() -> None:
    plan = planned("no", param_dtype="bf16")
    assert (plan.compute, plan.reduce, plan.upcast) == (torch.bfloat16, torch.float32, False)
    assert planned("bf16", param_dtype="bf16", reduce_dtype="bf16").reduce is torch.bfloat16


@pytest.mark.parametrize(("upcast", "param"), [(True, "bf16"), (False, "fp32")])
def test_an_upcast_that_contradicts_the_held_dtype_is_refused(upcast: bool, param: str) -> None:
    with pytest.raises(PrecisionError, match=f"fsdp.upcast={upcast} with precision.param_dtype='{param}'"):
        planned("bf16", FSDPSettings(upcast=upcast), param_dtype=param)


def test_an_upcast_that_says_the_same_is_allowed() -> None:
    assert planned("bf16", FSDPSettings(upcast=True), param_dtype="fp32").upcast is True
