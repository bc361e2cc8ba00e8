import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from drivetrain_backends.fsdp.gradients import global_norm, scale_to_norm
from drivetrain_backends.state_dict.dtensor import local, own_part, whole_of
from sharded_stack import context


def tensors() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=generator).double() for shape in ((5, 3), (1, 2), (4,), (2, 2))]


def divided() -> list[torch.Tensor]:
    """The same tensors over a line of ranks, a grid, a row of replicas, and whole."""
    line = init_device_mesh("cpu", (2,))
    grid = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "shard"))
    replicas = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "shard"))
    first, second, third, fourth = tensors()
    return [
        distribute_tensor(first, line, [Shard(0)]),
        distribute_tensor(second, grid, [Replicate(), Shard(0)]),
        distribute_tensor(third, replicas, [Replicate(), Shard(0)]),
        fourth,
    ]


def norm_over_meshes(norm_type: float) -> tuple[float, float]:
    with context() as where:
        gradients = divided()
        total = global_norm(gradients, norm_type, where.device)
        scale_to_norm(gradients, total, 0.1)
        return total.item(), global_norm(gradients, norm_type, where.device).item()


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, float("inf")])
def test_the_norm_over_several_meshes_is_that_of_the_whole(run_ranks, norm_type: float) -> None:
    expected = torch.linalg.vector_norm(torch.cat([t.flatten() for t in tensors()]), norm_type).item()
    for found, after in run_ranks(norm_over_meshes, norm_type):
        assert found == pytest.approx(expected, rel=1e-12)
        assert after == pytest.approx(0.1, rel=1e-5)


def parts_are_torchs() -> bool:
    with context() as where:
        return all(
            torch.equal(own_part(whole, part), local(part))
            and torch.equal(whole_of(part, where.device), whole)
            for whole, part in zip(tensors(), divided(), strict=True)
            if isinstance(part, DTensor)
        )


def test_a_ranks_part_is_the_one_that_torch_gives_it(run_ranks) -> None:
    assert run_ranks(parts_are_torchs) == [True, True]


def test_no_gradients_have_no_norm() -> None:
    assert global_norm([], 2.0, torch.device("cpu")).item() == 0
