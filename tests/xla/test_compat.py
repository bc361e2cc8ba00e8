"""The private names of torch-xla and torch are what this package relies on."""

import pytest
import torch
from torch import nn

from drivetrain_state import load_rng_state, rng_state, set_seed
from drivetrain_state.compat import xla_in_use
from drivetrain_xla import compat

pytestmark = pytest.mark.devices(1, 2, 4)


def test_a_tensor_chooses_the_devices_and_opens_the_cache() -> None:
    import torch_xla

    assert compat.devices_are_chosen(torch_xla)  # by the session's first Accelerator
    (torch.ones(2, device="xla") + 1).cpu()
    assert compat.cache_is_open(torch_xla)


def test_what_was_said_of_a_tensors_division_is_text() -> None:
    import torch_xla
    import torch_xla.distributed.spmd as spmd

    x = torch.ones(8, 2, device="xla")
    if not torch_xla.runtime.is_spmd():
        return
    assert compat.sharding_of(torch_xla, x) == ""
    mesh = spmd.get_1d_mesh("fsdp")
    spmd.mark_sharding(x, mesh, ("fsdp", None))
    assert compat.sharding_of(torch_xla, x).startswith(f"{{devices=[{mesh.mesh_shape[0]},1]")


def test_hooks_that_a_block_registers_can_be_removed() -> None:
    module = nn.Linear(2, 2)
    calls: list[str] = []
    module.register_full_backward_hook(lambda *_: calls.append("before"))
    removers: list[object] = []
    with compat.remembering_hooks(module, removers):
        module.register_full_backward_hook(lambda *_: calls.append("within"))
    assert len(removers) == 1
    removers[0]()  # pyright: ignore[reportCallIssue]
    module(torch.ones(1, 2, requires_grad=True)).sum().backward()
    assert calls == ["before"]


def test_leaves_of_nested_values_are_found_and_replaced() -> None:
    nested = {"a": [torch.ones(1), 2], "b": (torch.zeros(1),)}
    assert [float(one) for one in compat.tree_leaves(nested)] == [1.0, 2.0, 0.0]
    assert compat.tree_map_only(torch.Tensor, float, nested) == {"a": [1.0, 2], "b": (0.0,)}


def test_the_state_package_reads_xlas_generator() -> None:
    import torch_xla.core.xla_model

    assert xla_in_use() is torch_xla.core.xla_model
    torch_xla.core.xla_model.set_rng_state(9)
    assert rng_state()["torch_xla"] == 9
    load_rng_state({"torch_xla": 11})
    assert torch_xla.core.xla_model.get_rng_state() == 11
    set_seed(12)
    assert torch_xla.core.xla_model.get_rng_state() == 12


def test_hooks_before_a_forward_are_found() -> None:
    module, hook = nn.Linear(2, 2), lambda *_: None
    module.register_forward_pre_hook(hook)
    assert compat.forward_pre_hooks(module) == (hook,)
