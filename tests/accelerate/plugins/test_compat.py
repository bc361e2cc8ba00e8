"""Each private name of torch is what the plugins rely on: these tests tell when a new torch changes one."""

import pytest
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import wrap
from torch.testing._internal.distributed.fake_pg import FakeStore

from drivetrain_accelerate.plugins import compat


def test_the_classes_of_a_wrap_policy() -> None:
    assert set(compat.wrapped_classes(wrap.ModuleWrapPolicy([nn.Linear, nn.ReLU]))) == {nn.Linear, nn.ReLU}


def test_policies_are_combined() -> None:
    def never(**_: object) -> bool:
        return False

    def always(**_: object) -> bool:
        return True

    options = {"module": nn.ReLU(), "recurse": False, "nonwrapped_numel": 0}
    assert compat.either_policy(policies=[never, always], **options)
    assert not compat.either_policy(policies=[never], **options)


@pytest.mark.filterwarnings("ignore:Slicing a flattened dim")  # torch 2.15
@pytest.mark.slow
def test_axes_of_a_mesh_get_a_joint_name() -> None:
    distributed.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        compat.flatten_mesh(mesh, ("a", "b"), "both")
        assert mesh["both"].mesh.tolist() == [0, 1, 2, 3]
    finally:
        distributed.destroy_process_group()
