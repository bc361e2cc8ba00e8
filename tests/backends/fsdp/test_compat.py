"""Each private name of FSDP2 is what the backend relies on: these tests tell when a new torch changes one."""

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from drivetrain_backends.fsdp import compat
from sharded_stack import context


def sharded(**options: object) -> nn.Sequential:
    context()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    for layer in model:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def parameters() -> bool:
    model = sharded()
    (group,) = compat.parameter_groups(model[0])
    held = list(compat.sharded_parameters(model[0]))
    assert [parameter.sharded_param for parameter in held] == [model[0].weight, model[0].bias]
    assert group.fsdp_params == held
    assert compat.parameter_groups(model) == []  # it holds no parameter of its own
    slots, name = compat.module_slot(held[0])
    assert name == "weight"
    assert slots[name] is model[0].weight
    return isinstance(model[0].weight, DTensor)


def gathered() -> bool:
    model = sharded()
    weight = next(compat.sharded_parameters(model[0]))
    assert compat.gathered_parameter(weight) is None
    model(torch.ones(1, 4))
    full = compat.gathered_parameter(weight)
    assert full.shape == (4, 4)
    model(torch.ones(1, 4))
    return compat.gathered_parameter(weight) is full


def full_gradients() -> bool:
    model = sharded()
    model.set_requires_gradient_sync(False)
    held = [*compat.sharded_parameters(model[0])]
    assert not any(map(compat.holds_full_gradient, held))
    model(torch.ones(1, 4)).sum().backward()
    assert all(map(compat.holds_full_gradient, held))
    for parameter in held:
        compat.drop_full_gradient(parameter)
    return not any(map(compat.holds_full_gradient, held))


def open_backward() -> bool:
    model = sharded()
    x, during = torch.ones(1, 4, requires_grad=True), []
    x.register_hook(lambda _: during.append(compat.backward_is_open(model)))
    model(x).sum().backward()
    return during == [True] and not compat.backward_is_open(model)


def refused_forward() -> bool:
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
    return torch.equal(found.detach(), expected)


def checks() -> list[str]:
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
    return said


class Noted:
    def __init__(self, inner: object, said: list[str], name: str) -> None:
        self.inner, self.said, self.name = inner, said, name

    def allocate(self, *args: object, **kwargs: object) -> Tensor:
        return self.inner.allocate(*args, **kwargs)

    def __call__(self, *args: object, **kwargs: object) -> object:
        self.said.append(self.name)
        return self.inner(*args, **kwargs)


def collectives() -> list[str]:
    model, said = sharded(), []
    (group,) = compat.parameter_groups(model[0])
    compat.wrap_collectives(
        group, lambda inner: Noted(inner, said, "gather"), lambda inner: Noted(inner, said, "reduce")
    )
    model(torch.ones(1, 4)).sum().backward()
    return said


def settings() -> list[object]:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    model = sharded(mp_policy=policy, reshard_after_forward=False)
    model[0].set_modules_to_forward_prefetch([model[1]])
    (group,) = compat.parameter_groups(model[0])
    return [
        compat.mixed_precision(model[0]) == policy,
        compat.num_prefetched(model[0]),
        compat.num_prefetched(model[1]),
        compat.reshards_after_forward(group),
        compat.reshards_after_forward(*compat.parameter_groups(sharded(reshard_after_forward=True)[0])),
    ]


def gradient_dtypes() -> bool:
    model = sharded(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)).requires_grad_(False)
    groups = [group for layer in model for group in compat.parameter_groups(layer)]
    if not any(map(compat.needs_gradient_dtypes, groups)):
        return True  # this torch finds them by itself
    assert not any(map(compat.give_gradient_dtypes, groups))
    model(torch.ones(1, 4))
    assert list(map(compat.give_gradient_dtypes, groups)) == [True, True]
    model.requires_grad_(True)
    model(torch.ones(1, 4)).sum().backward()
    return model[0].weight.grad.dtype == torch.float32


@pytest.mark.parametrize(
    "relied_on",
    [parameters, gathered, full_gradients, open_backward, refused_forward, gradient_dtypes],
    ids=lambda function: function.__name__,
)
def test_torch_keeps_it_so(run_ranks, relied_on) -> None:
    assert run_ranks(relied_on) == [True, True]


def test_checks_run_where_they_are_put(run_ranks) -> None:
    # The block is gathered in the forward and again in the backward.
    assert run_ranks(checks) == [["first", "gather", "backward", "gather"]] * 2


def test_the_objects_that_run_collectives_are_exchanged(run_ranks) -> None:
    assert run_ranks(collectives) == [["gather", "gather", "reduce"]] * 2


def test_settings_are_read_back(run_ranks) -> None:
    assert run_ranks(settings) == [[True, 1, 0, False, True]] * 2
