"""The numbers of ranks that programs read and name; beside the real Accelerate where it can run it."""

from typing import Any

import pytest
import torch

from accelerate_sides import OURS, SIDES, on_sides, said
from drivetrain_accelerate.plugins.enums import DistributedType
from drivetrain_accelerate.plugins.parallelism_config import ParallelismConfig
from drivetrain_accelerate.states.partial_state import distributed_type_on

pytest.importorskip("accelerate")

NUMBERS = (
    *("data_parallel_rank", "data_parallel_shard_rank", "tensor_parallel_rank"),
    *("pipeline_parallel_rank", "context_parallel_rank"),
)


@pytest.mark.parametrize("index", [0, 1, 5, -1, None])
def test_one_process_runs_what_is_for_one_rank_whichever_that_is(index: int | None) -> None:
    def run(accelerator: Any) -> list[str]:
        return [
            accelerator.on_process(lambda: "a", process_index=index)(),
            accelerator.on_local_process(lambda: "b", local_process_index=index)(),
        ]

    assert on_sides(run) == [["a", "b"]] * 2


def outcomes(accelerator: Any) -> list[Any]:
    rank = accelerator.process_index
    own = torch.tensor([float(rank + 1)])
    return [
        accelerator.gather({"a": own})["a"].tolist(),
        accelerator.reduce(own).tolist(),
        accelerator.reduce([own], "mean")[0].tolist(),
        accelerator.pad_across_processes(torch.ones(rank + 1), pad_index=-1).tolist(),
        accelerator.on_local_process(lambda: "ran", local_process_index=1)(),
    ]


def outcomes_on_each_rank() -> list[list[Any]]:
    return on_sides(outcomes)


@pytest.mark.slow
def test_ranks_get_what_the_real_one_gives_them(run_ranks: Any) -> None:
    for rank, found in enumerate(run_ranks(outcomes_on_each_rank)):
        padded = [1.0, 1.0] if rank else [1.0, -1.0]
        assert found == [[[1.0, 2.0], [3.0], [1.5], padded, "ran" if rank else None]] * 2


def test_without_parallel_dimensions_their_ranks_are_errors() -> None:
    def answers(accelerator: Any) -> list[str]:
        assert accelerator.torch_device_mesh is None
        return [said(lambda name=name: getattr(accelerator, name)).partition(":")[0] for name in NUMBERS]

    assert on_sides(answers) == [["RuntimeError"] * 3 + ["NotImplementedError"] * 2] * 2


def test_the_scale_of_a_reduction_is_not_applied(caplog: pytest.LogCaptureFixture) -> None:
    for side in SIDES[:2]:
        with side.accelerator() as accelerator:
            reduce = side("accelerate.utils.reduce")
            ones = torch.ones(2)
            for found in (accelerator.reduce(ones, scale=3.0), reduce(ones, scale=3.0)):
                assert found.tolist() == [1.0, 1.0]
    assert caplog.text.count("reduce(scale=3.0): it is applied on XLA devices alone") == 2


@pytest.mark.parametrize("kind", ["xla", "mps", "musa", "sdaa", "neuron"])
def test_several_processes_on_devices_without_a_way_to_train_together_are_told(kind: str) -> None:
    assert distributed_type_on("cuda") == DistributedType.MULTI_GPU
    with pytest.raises(NotImplementedError, match=f"several processes on {kind}: .* cpu, cuda, .*; run one"):
        distributed_type_on(kind)


def numbers_on_each_rank(sizes: dict[str, Any]) -> list[Any]:
    with OURS.accelerator(parallelism_config=ParallelismConfig(**sizes)) as accelerator:
        mesh = accelerator.torch_device_mesh
        found = [getattr(accelerator, name) for name in NUMBERS[:3]]
        found += [
            mesh.mesh_dim_names,
            mesh.size(),
            mesh.get_local_rank(),
            accelerator.state.device_mesh is mesh,
        ]
        return found


@pytest.mark.slow
def test_ranks_count_along_the_parallel_dimensions(run_ranks: Any) -> None:
    for name, place in (("dp_replicate", 0), ("dp_shard", 1), ("tp", 2)):
        for rank, found in enumerate(run_ranks(numbers_on_each_rank, {f"{name}_size": 2})):
            numbers = [0, 0, 0]
            numbers[place] = rank
            assert found == [*numbers, (name,), 2, rank, True]
    for rank, found in enumerate(run_ranks(numbers_on_each_rank, {"sp_size": 2})):
        assert found == [0, 0, 0, ("sp",), 2, rank, True]
