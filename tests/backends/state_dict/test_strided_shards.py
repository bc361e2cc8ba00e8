"""Shards of tensors that tensor parallelism and FSDP divide along the same dimension, also unevenly."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from drivetrain_backends.fsdp.gradients import global_norm
from drivetrain_backends.state_dict.dtensor import local, own_part, whole_of

SIZES = (16, 10, 5, 3)  # rows over 2 x 2 ranks


def divided(dim: int, whole: torch.Tensor, names: tuple[str, ...] = ("shard", "tensor")) -> torch.Tensor:
    """A parameter that is divided over the axis `tensor` first, and then by FSDP over the outer axes."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    module = nn.Module()
    module.weight = nn.Parameter(distribute_tensor(whole, mesh["tensor"], [Shard(dim)]))
    fully_shard(module, mesh=mesh[names[0]])
    return module.weight.detach()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("rows", SIZES)
def test_parts_norms_and_whole_tensors_are_those_of_the_whole(rows: int, dim: int) -> None:
    whole = torch.arange(rows * 6, dtype=torch.float64).reshape(rows, 6) - 7.5
    part = divided(dim, whole.clone())
    assert torch.equal(own_part(whole, part), local(part))
    assert torch.equal(whole_of(part, whole.device), whole)
    assert global_norm([part], 2.0, whole.device).item() == pytest.approx(whole.norm().item(), rel=1e-12)


@pytest.mark.ranks(4)
def test_signs_of_zero_and_bytes_of_any_dtype_are_kept() -> None:
    whole = torch.tensor([[-0.0], [float("nan")], [float("inf")], [-1.5], [0.0]]).bfloat16()
    found = whole_of(divided(0, whole.clone()), whole.device)
    assert torch.equal(found.view(torch.int16), whole.view(torch.int16))


@pytest.mark.ranks(4)
def test_shards_of_shards_that_torch_cuts_in_order_stay_as_they_are() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "shard"))
    whole = torch.arange(10.0)
    for placements in ([Replicate(), Shard(0)], [Shard(0), Shard(0)], [Shard(0), Replicate()]):
        part = distribute_tensor(whole, mesh, placements)
        assert torch.equal(own_part(whole, part), local(part))
