"""Each private name of FSDP2 is what the backend relies on: these tests tell when a new torch changes one."""

from contextlib import ExitStack

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from drivetrain_backends.fsdp import compat
from drivetrain_state import gather
from plain_loop.backends import context


def sharded(**options: object) -> nn.Sequential:
    context()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    for layer in model:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


pytestmark = pytest.mark.ranks(2)


def test_a_block_lists_its_sharded_parameters_and_their_places() -> None:
    model = sharded()
    (group,) = compat.parameter_groups(model[0])
    held = list(compat.sharded_parameters(model[0]))
    assert [parameter.sharded_param for parameter in held] == [model[0].weight, model[0].bias]
    assert group.fsdp_params == held
    assert compat.parameter_groups(model) == []  # it holds no parameter of its own
    slots, name = compat.module_slot(held[0])
    assert name == "weight"
    assert slots[name] is model[0].weight
    assert isinstance(model[0].weight, DTensor)


def test_a_gathered_parameter_is_one_tensor_throughout() -> None:
    model = sharded()
    weight = next(compat.sharded_parameters(model[0]))
    assert compat.gathered_parameter(weight) is None
    model(torch.ones(1, 4))
    full = compat.gathered_parameter(weight)
    assert full.shape == (4, 4)
    model(torch.ones(1, 4))
    assert compat.gathered_parameter(weight) is full


def test_replicas_reduce_apart_in_the_block_and_together_after_it() -> None:
    rank, mesh = context().topology.rank, init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "shard"))
    model = sharded(mesh=mesh, reshard_after_forward=True)
    groups = [group for block in model for group in compat.parameter_groups(block)]
    assert [compat.replica_ranks(group) for group in groups] == [(0, 1)] * 2
    for is_apart in (True, False):
        with ExitStack() as stack:
            for group in groups if is_apart else ():
                stack.enter_context(compat.reduced_in_replica(group))
            model(torch.full((1, 4), 1.0 + rank)).sum().backward()
        found = model[0].weight.grad.to_local().clone()
        model.zero_grad()
        of_ranks = gather(context(), found[None])
        assert torch.equal(of_ranks[0], of_ranks[1]) != is_apart
        torch.testing.assert_close(of_ranks[1], of_ranks[0] * (2 if is_apart else 1))


def test_full_gradients_are_held_and_dropped() -> None:
    model = sharded()
    model.set_requires_gradient_sync(False)
    held = [*compat.sharded_parameters(model[0])]
    assert not any(map(compat.holds_full_gradient, held))
    model(torch.ones(1, 4)).sum().backward()
    assert all(map(compat.holds_full_gradient, held))
    for parameter in held:
        compat.drop_full_gradient(parameter)
    assert not any(map(compat.holds_full_gradient, held))


def test_a_backward_is_open_while_it_runs() -> None:
    model = sharded()
    x, during = torch.ones(1, 4, requires_grad=True), []
    x.register_hook(lambda _: during.append(compat.backward_is_open(model)))
    model(x).sum().backward()
    assert during == [True]
    assert not compat.backward_is_open(model)


def test_a_model_begins_anew_after_a_forward_that_failed() -> None:
    model = sharded()
    x = torch.ones(1, 4)
    expected = model(x).detach()

    def refuse(*_: object) -> None:
        raise RuntimeError("refused")

    handle = model[1].register_forward_pre_hook(refuse)
    with pytest.raises(RuntimeError, match="refused"):
        model(x)
    handle.remove()
    for block in (*model, model):
        compat.begin_anew(block)
        block.reshard()
    found = model(x)
    found.sum().backward()
    assert torch.equal(found.detach(), expected)


def test_checks_run_where_they_are_put() -> None:
    model, said = sharded(), []
    compat.check_before_first_forward(model, lambda: said.append("first"))
    (group,) = compat.parameter_groups(model[0])
    compat.check_before_gathering(group, lambda: said.append("gather"))
    compat.check_before_backward(model[1], lambda: said.append("backward"))
    compat.call_after_gathering(group, lambda: gathered.append(compat.is_in_forward(group)))
    gathered, opened = [], []
    handle = model[0].register_forward_hook(lambda *_: opened.append(compat.forward_is_open(model)))
    model(torch.ones(1, 4)).sum().backward()
    assert opened == [True]
    assert not compat.forward_is_open(model)
    assert gathered == [True, False]  # for the forward, and for the backward
    handle.remove()
    assert said == [
        "first",
        "gather",
        "backward",
        "gather",
    ]  # gathered in the forward and again in the backward


class Noted:
    def __init__(self, inner: object, said: list[str], name: str) -> None:
        self.inner, self.said, self.name = inner, said, name

    def allocate(self, *args: object, **kwargs: object) -> Tensor:
        return self.inner.allocate(*args, **kwargs)

    def __call__(self, *args: object, **kwargs: object) -> object:
        self.said.append(self.name)
        return self.inner(*args, **kwargs)


def test_the_objects_that_run_collectives_are_exchanged() -> None:
    model, said = sharded(), []
    (group,) = compat.parameter_groups(model[0])
    compat.wrap_collectives(
        group, lambda inner: Noted(inner, said, "gather"), lambda inner: Noted(inner, said, "reduce")
    )
    model(torch.ones(1, 4)).sum().backward()
    assert said == ["gather", "gather", "reduce"]


def test_settings_are_read_back() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    model = sharded(mp_policy=policy, reshard_after_forward=False)
    model[0].set_modules_to_forward_prefetch([model[1]])
    (group,) = compat.parameter_groups(model[0])
    assert compat.mixed_precision(model[0]) == policy
    assert [compat.num_prefetched(layer) for layer in model] == [1, 0]
    assert not compat.reshards_after_forward(group)
    assert compat.reshards_after_forward(*compat.parameter_groups(sharded(reshard_after_forward=True)[0]))


def test_frozen_groups_are_given_the_dtypes_of_their_gradients() -> None:
    model = sharded(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)).requires_grad_(False)
    groups = [group for layer in model for group in compat.parameter_groups(layer)]
    if not any(map(compat.needs_gradient_dtypes, groups)):
        return  # this torch finds them by itself
    assert not any(map(compat.give_gradient_dtypes, groups))
    model(torch.ones(1, 4))
    assert list(map(compat.give_gradient_dtypes, groups)) == [True, True]
    model.requires_grad_(True)
    model(torch.ones(1, 4)).sum().backward()
    assert model[0].weight.grad.dtype == torch.float32
