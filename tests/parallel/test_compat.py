"""A module's dict of parameters is what its forward reads them from; wrappers of tensors hold no values."""

from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from drivetrain_parallel.compat import (
    DisableTorchFunctionSubclass,
    changes_in_place,
    exchanged_parameters,
    make_wrapper,
    shared_attributes,
    tree_map_only,
    unseen_by_modes,
)


def test_a_copy_shares_what_is_no_module_or_tensor() -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    module.config = SimpleNamespace(kind="linear")  # type: ignore[assignment]
    copied = deepcopy(module, shared_attributes(module))
    module[0].register_forward_hook(lambda *_: torch.zeros(1, 2))
    assert copied(torch.ones(1, 2)).any()
    assert copied.config is module.config
    assert copied[0] is not module[0]
    assert copied[0].weight is not module[0].weight
    assert list(copied.state_dict()) == list(module.state_dict())


def test_a_forward_reads_the_exchanged_parameters() -> None:
    layer = nn.Linear(2, 1, bias=False)
    weight = layer.weight
    with exchanged_parameters(layer, lambda parameter: parameter * 0 + 2):
        assert layer(torch.ones(2)).item() == 4
    assert layer.weight is weight
    assert dict(layer.named_parameters()) == {"weight": weight}


def test_the_parameters_are_back_after_a_failure_and_none_stays_none() -> None:
    layer = nn.Linear(2, 1, bias=False)
    weight = layer.weight
    with pytest.raises(RuntimeError, match="cannot be multiplied"), exchanged_parameters(layer, torch.clone):
        layer(torch.ones(2, 3))
    with exchanged_parameters(layer, torch.clone):
        assert layer.bias is None
    assert layer.weight is weight


class Wrapper(torch.Tensor):
    """A tensor without values."""

    @classmethod
    def __torch_dispatch__(
        cls, func: object, types: object, args: object = (), kwargs: object = None
    ) -> None:
        raise RuntimeError(f"{func} has no values")


def test_a_wrapper_looks_like_a_wider_tensor_and_computes_nothing() -> None:
    part = torch.ones(4, 6, 3, dtype=torch.float64)[:, 2:]
    made = make_wrapper(Wrapper, part, (4, 4, 10), (60, 10, 1))
    assert (made.shape, made.stride(), made.dtype) == ((4, 4, 10), (60, 10, 1), torch.float64)
    with pytest.raises(RuntimeError, match=r"aten\.mul\.Tensor has no values"):
        made.mul(2)
    with DisableTorchFunctionSubclass(), pytest.raises(RuntimeError, match="has no values"):
        made.sum()
    assert tree_map_only(Wrapper, id, ([made], {"a": part})) == ([id(made)], {"a": part})


def test_operators_that_change_an_argument_are_known() -> None:
    assert changes_in_place(torch.ops.aten.mul_.Tensor)
    assert not changes_in_place(torch.ops.aten.mul.Tensor)


@unseen_by_modes()
def multiply() -> torch.Tensor:
    return torch.ones(2, 2) @ torch.ones(2, 2)


def test_a_mode_sees_no_operation_of_a_context_or_of_a_decorated_function() -> None:
    with FlopCounterMode(display=False) as counter:
        multiply()
        with unseen_by_modes():
            torch.ones(2, 2) @ torch.ones(2, 2)
        assert counter.get_total_flops() == 0
        torch.ones(2, 2) @ torch.ones(2, 2)
        assert counter.get_total_flops() == 16
