"""Each private name of torch is what backends rely on: these tests tell when a new torch changes one.

The kernels over many gradients are tested in gradients/test_multi_tensor.py.
"""

import subprocess
import sys
import time

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional as F
from torch.optim import SGD
from torch.optim.lr_scheduler import ChainedScheduler, ConstantLR, CosineAnnealingLR, LinearLR, SequentialLR
from torch.utils._python_dispatch import TorchDispatchMode

from drivetrain_backends import compat
from plain_loop.backends import context


def test_each_write_in_place_raises_the_version_and_no_read_does() -> None:
    tensor = torch.ones(3)
    before = compat.version_of(tensor)
    tensor.sum()
    assert compat.version_of(tensor) == before
    tensor.detach().mul_(2)  # shares the count
    tensor[0] = 1
    assert compat.version_of(tensor) == before + 2


def test_only_the_nonzero_rows_of_a_sparse_gradient_are_its_values() -> None:
    gradient = torch.sparse_coo_tensor(
        torch.tensor([[2, 2]]), torch.ones(2, 3), (4, 3), check_invariants=True
    )
    assert compat.values_of_sparse(gradient).tolist() == [[1.0] * 3] * 2


@pytest.mark.ranks(2)
def test_a_dtensor_holds_its_shard_itself_and_no_copy() -> None:
    where = context()
    mesh = torch.distributed.init_device_mesh("cpu", (where.topology.world_size,))
    own = torch.full((1, 2), float(where.topology.rank))
    divided = DTensor.from_local(own, mesh, [Shard(0)])
    found: Tensor = getattr(divided, compat.LOCAL_SHARD)
    divided.mul_(2)
    assert type(found) is Tensor
    assert found.data_ptr() == own.data_ptr()
    assert found.tolist() == [[2.0 * where.topology.rank] * 2]


def test_hooks_of_parameters_are_found_and_taken_with_the_dicts_that_handles_refer_to() -> None:
    plain, hooked, accumulated = (nn.Parameter(torch.ones(2)) for _ in range(3))
    called: list[str] = []
    handle = hooked.register_hook(lambda _: called.append("gradient"))
    accumulated.register_post_accumulate_grad_hook(lambda _: called.append("parameter"))
    found = compat.parameters_with_hooks([plain, hooked, accumulated])
    assert [id(one) for one in found] == [id(hooked), id(accumulated)]
    of_gradient, _ = compat.take_hooks(hooked)
    _, of_parameter = compat.take_hooks(accumulated)
    assert len(of_gradient) == len(of_parameter) == 1
    assert compat.parameters_with_hooks([plain, hooked, accumulated]) == []
    (plain + hooked).sum().backward()
    assert called == []
    accumulated.sum().backward()  # no shard gets a gradient from autograd, which keeps this hook
    assert called == ["parameter"]
    handle.remove()
    assert len(of_gradient) == 0
    assert not any(compat.take_hooks(plain))


@pytest.mark.parametrize(
    "layer",
    [nn.BatchNorm1d(2), nn.BatchNorm2d(2), nn.BatchNorm3d(2), nn.LazyBatchNorm1d(), nn.SyncBatchNorm(2)],
    ids=lambda layer: type(layer).__name__,
)
def test_every_batch_normalisation_has_the_one_base(layer: nn.Module) -> None:
    assert isinstance(layer, compat.BatchNorm)
    assert not isinstance(nn.GroupNorm(1, 2), compat.BatchNorm)
    assert not isinstance(nn.InstanceNorm1d(2), compat.BatchNorm)


def test_a_modules_dicts_are_its_own_and_follow_it() -> None:
    module = nn.Sequential(nn.BatchNorm1d(2))
    layer = module[0]
    parameters, buffers, modules = (
        compat.parameters_in(layer),
        compat.buffers_in(layer),
        compat.modules_in(module),
    )
    layer.weight = nn.Parameter(torch.zeros(2))
    layer.running_mean = torch.full((2,), 3.0)
    module.append(nn.Linear(2, 2))
    assert parameters["weight"] is layer.weight
    assert buffers["running_mean"] is layer.running_mean
    assert list(modules.values()) == list(module)


def test_a_module_tells_of_hooks_that_change_a_state_before_it_is_loaded() -> None:
    module = nn.Linear(2, 2)
    assert not compat.has_load_hooks(module)
    handle = module.register_load_state_dict_pre_hook(lambda *_: None)
    assert compat.has_load_hooks(module)
    handle.remove()
    assert not compat.has_load_hooks(module)


def test_an_optimizer_tells_of_hooks_that_change_a_state_before_it_is_loaded() -> None:
    optimizer = SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    assert not compat.changes_states(optimizer)
    handle = optimizer.register_load_state_dict_pre_hook(lambda *_: None)
    assert compat.changes_states(optimizer)
    handle.remove()
    assert not compat.changes_states(optimizer)


def test_the_dicts_of_an_optimizers_hooks_have_names_of_the_known_beginning() -> None:
    optimizer = SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    optimizer.register_step_pre_hook(print)
    optimizer.register_step_post_hook(print)
    optimizer.register_state_dict_pre_hook(print)
    optimizer.register_load_state_dict_post_hook(print)
    holds = [
        name for name, value in vars(optimizer).items() if isinstance(value, dict) and print in value.values()
    ]
    assert len(holds) == 4
    assert all(name.startswith(compat.OPTIMIZER_HOOKS) for name in holds)


def test_attention_and_products_of_fp8_are_operations_of_torch() -> None:
    seen: list[str] = []

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func.__name__.partition(".")[0])
            return func(*args, **(kwargs or {}))

    with Operations():
        F.scaled_dot_product_attention(*torch.ones(3, 1, 2, 4, 8).unbind())
    assert set(seen) & set(compat.ATTENTION_AND_FP8)
    assert all(hasattr(torch.ops.aten, name) for name in compat.ATTENTION_AND_FP8)


@pytest.mark.costly
@pytest.mark.slow
def test_a_compiled_model_holds_the_module_under_the_known_name_once_the_compiler_is_imported() -> None:
    source = (
        "import torch\nfrom drivetrain_backends import compat\n"
        "print(compat.is_compiler_imported())\n"
        "compiled = torch.compile(torch.nn.Linear(2, 2))\n"
        "print([name for name, _ in compiled.named_children()] == [compat.COMPILED_MODULE])\n"
        "print(compat.is_compiler_imported())\n"
    )
    finished = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL
    )
    assert finished.stdout.split() == ["False", "True", "True"]


def test_combined_schedulers_tell_their_parts_and_when_they_go_on() -> None:
    stepped = SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    parts = [LinearLR(stepped), ConstantLR(stepped), CosineAnnealingLR(stepped, T_max=5)]
    sequence = SequentialLR(stepped, parts, milestones=[2, 4])
    assert list(compat.schedulers_in(sequence)) == parts
    assert list(compat.milestones_of(sequence)) == [2, 4]
    chain = ChainedScheduler(parts[:2], stepped)
    assert list(compat.schedulers_in(chain)) == parts[:2]
    assert list(compat.milestones_of(chain)) == []
    assert list(compat.schedulers_in(parts[0])) == list(compat.milestones_of(parts[0])) == []


def test_functions_run_after_every_gradient_in_the_order_in_which_they_were_queued() -> None:
    order: list[str] = []
    layer = nn.Linear(2, 1)
    layer.weight.register_post_accumulate_grad_hook(lambda _: order.append("gradient"))

    def queue_more(_: torch.Tensor) -> None:
        compat.call_after_backward(lambda: order.append("second"))

    hidden = torch.ones(1, 2).requires_grad_()
    hidden.register_hook(queue_more)
    loss = layer(hidden).sum()
    loss.register_hook(lambda _: compat.call_after_backward(lambda: order.append("first")))
    loss.backward()
    assert order == ["gradient", "first", "second"]


def test_compilations_are_told_with_why_they_were_done_again() -> None:
    begun = time.time()
    double = torch.compile(lambda x: x + x, backend="aot_eager")
    for size in (2, 3):
        double(torch.ones(size))
    (first, why), (again, reason) = compat.compilations(begun)
    assert min(first, again) > 0
    assert why is None
    assert "size mismatch" in (reason or "")
