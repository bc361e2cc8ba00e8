"""Calls of a sharded model that FSDP would compute with other weights, or fail on with an error about storage.

The checks wrap methods of torch's own objects, where FSDP starts to gather and to run backward: this covers every
strategy and blocks that are called directly, and torch.compile does not trace it.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NoReturn

import torch

from drivetrain_backends.errors import SecondDerivativeError, UnshardedParameterError
from drivetrain_backends.fsdp.compat import (
    begin_anew,
    check_before_backward,
    check_before_first_forward,
    check_before_gathering,
    module_slot,
    parameter_groups,
)
from drivetrain_backends.fsdp.sharded_model import ShardedModel
from drivetrain_backends.modules.wrap_policy import class_name


def refuse_misuse(sharded: ShardedModel) -> None:
    """Refuse forwards with parameters other than the model's own, and second derivatives, from now on."""
    kind = class_name(sharded.module)
    names = {place.parameter: place.name for place in sharded.places}

    def refuse(name: str) -> NoReturn:
        _begin_anew(sharded)
        raise UnshardedParameterError(
            f"a forward of {kind} with another tensor in the place of {name}, as torch.func.functional_call and "
            "gathered() put there: FSDP would compute with its own. Run such a forward on a model that is not "
            "prepared, or under backend='single'; values go in inside gathered(write=True)"
        )

    every: list[_Held] = []
    for block in sharded.blocks:
        for group in parameter_groups(block):
            held = [_Held(parameter, names[parameter.sharded_param]) for parameter in group.fsdp_params]
            every += held
            check_before_gathering(group, partial(_check, held, refuse))
    for block in sharded.blocks:
        check_before_first_forward(block, partial(_check, every, refuse))
        check_before_backward(block, partial(_refuse_second_derivative, kind))


def explain_ungathered(sharded: ShardedModel, error: RuntimeError) -> UnshardedParameterError | None:
    """Return the error for a forward that used a block's shards as parameters; None for any other error."""
    _begin_anew(sharded)
    check_unconverted([sharded], error)
    if "got mixed torch.Tensor and DTensor" not in str(error):
        return None
    sharded.reshard()
    classes = {class_name(sharded.module.get_submodule(name)) for name in sharded.plan.blocks}
    return UnshardedParameterError(
        f"a forward of {class_name(sharded.module)} used parameters of a block that is not gathered: it calls "
        "block.forward(...) where FSDP sees block(...) alone, or reads the block's weights from outside. Blocks are "
        f"{', '.join(sorted(classes)) or 'the whole model'}: have the model call them, name classes that it calls "
        "(--fsdp-wrap), gather all at once (--fsdp-min-num-params above the model's size), or use backend='ddp'"
    )


def check_unconverted(models: Iterable[ShardedModel], error: BaseException | None = None) -> None:
    """Refuse models whose shards were converted to another dtype, for which FSDP has no memory."""
    for sharded in models:
        dtypes = {id(p.sharded_param): p.orig_dtype for p in sharded.divided() if hasattr(p, "orig_dtype")}
        for name, parameter in sharded.parameters.items():
            if parameter.dtype is not (dtype := dtypes.get(id(parameter), parameter.dtype)):
                raise UnshardedParameterError(
                    f"{name} of {class_name(sharded.module)} was converted from {str(dtype)[6:]} to "
                    f"{str(parameter.dtype)[6:]} after prepare(), as by model.to(...): FSDP gathers and reduces in "
                    "what it was prepared with. Convert a model before prepare(); for an export, convert what "
                    "get_state_dict() returns"
                ) from error


def _begin_anew(sharded: ShardedModel) -> None:
    for block in sharded.blocks:
        begin_anew(block)


class _Held:
    """The slot of a module that holds a parameter for torch to gather."""

    __slots__ = ("attribute", "name", "parameter", "slots")

    def __init__(self, parameter: Any, name: str) -> None:
        self.parameter, self.name = parameter, name
        self.slots, self.attribute = module_slot(parameter)


def _check(held: Sequence[_Held], refuse: Callable[[str], NoReturn]) -> None:
    for one in held:
        if one.slots.get(one.attribute) is not one.parameter.sharded_param:
            refuse(one.name)


def _refuse_second_derivative(kind: str) -> None:
    if torch.is_grad_enabled():
        raise SecondDerivativeError(
            f"a backward through {kind} with create_graph=True, as a gradient penalty takes: FSDP lets gathered "
            "parameters go in backward, and a second one would need them. Use backend='single' or 'ddp'; or "
            "take the penalty of a difference of outputs instead of a gradient"
        )
