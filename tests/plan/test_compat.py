"""Private names of torch that the planner uses, on every version of it."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from drivetrain_plan import MODES, FactorySource, PlanChoice
from drivetrain_plan.compat import fake_meshes
from drivetrain_plan.model.source import BuiltSource
from drivetrain_plan.program.rank_step import run_rank
from planned_models import perceptron


def gathered_without_data() -> None:
    with fake_meshes() as meshes:
        mesh = meshes(data=2, shard=4)
        assert mesh.shape == (2, 4)
        assert meshes(data=2, shard=4) is mesh
        group = mesh.get_group(1)
        assert dist.get_world_size(group) == 4
        found = torch.empty(8)
        dist.all_gather_into_tensor(found, torch.ones(2), group=group)
        assert meshes(shard=64).size() == 64  # more than the first had ranks


def test_ranks_that_do_not_exist_need_no_group_and_leave_none() -> None:
    gathered_without_data()
    gathered_without_data()
    assert not dist.is_initialized()


@pytest.mark.ranks(2)
def test_ranks_that_do_not_exist_leave_the_groups_of_a_run_alone() -> None:
    source = BuiltSource(FactorySource("perceptron", perceptron), MODES["fp32"])
    choice = PlanChoice(shard=2, strategy="full_shard")
    if dist.get_rank() == 0:  # the other does nothing meanwhile
        gathered_without_data()
        whole = run_rank(source, PlanChoice(), MODES["fp32"], num_tokens=1)
        half = run_rank(source, choice, MODES["fp32"], num_tokens=1)
        assert half.weights == pytest.approx(whole.weights / 2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    tensor = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
    assert isinstance(tensor, DTensor)
    assert tensor.full_tensor().tolist() == [0, 1, 2, 3]
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 2
