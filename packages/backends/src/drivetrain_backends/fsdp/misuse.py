"""Calls of a sharded model that FSDP would compute with other weights, or fail on with an error about storage.

The checks wrap methods of torch's own objects, where FSDP starts to gather and to run backward: this covers every
strategy and blocks that are called directly, and torch.compile does not trace it.
"""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch.distributed.fsdp._fully_shard._fsdp_common import (  # pyright: ignore[reportMissingTypeStubs]
    TrainingState,
)

from drivetrain_backends.errors import SecondDerivativeError, UnshardedParameterError
from drivetrain_backends.fsdp.sharded_model import ShardedModel, parameter_groups
from drivetrain_backends.modules.wrap_policy import class_name


def refuse_misuse(sharded: ShardedModel) -> None:
    """Refuse forwards with parameters other than the model's own, and second derivatives, from now on."""
    kind = class_name(sharded.module)
    names = {place.parameter: place.name for place in sharded.places}
    states: list[Any] = [block._get_fsdp_state() for block in sharded.blocks]  # pyright: ignore[reportPrivateUsage]
    groups = [group for block in sharded.blocks for group in parameter_groups(block)]

    def refuse(name: str) -> NoReturn:
        _begin_anew(states, groups)
        raise UnshardedParameterError(
            f"a forward of {kind} with another tensor in the place of {name}, as torch.func.functional_call and "
            "gathered() put there: FSDP would compute with its own. Run such a forward on a model that is not "
            "prepared, or under backend='single'; values go in inside gathered(write=True)"
        )

    every: list[_Held] = []
    for group in groups:
        held = [_Held(parameter, names[parameter.sharded_param]) for parameter in group.fsdp_params]
        every += held
        _look_before_gathering(group, held, refuse)
    for state in states:
        _look_before_first_forward(state, every, refuse)
        _look_before_backward(state, kind)


def explain_ungathered(sharded: ShardedModel, error: RuntimeError) -> UnshardedParameterError | None:
    """Return the error for a forward that used a block's shards as parameters; None for any other error."""
    if "got mixed torch.Tensor and DTensor" not in str(error):
        return None
    states: list[Any] = [block._get_fsdp_state() for block in sharded.blocks]  # pyright: ignore[reportPrivateUsage]
    _begin_anew(states, [group for block in sharded.blocks for group in parameter_groups(block)])
    sharded.reshard()
    classes = {class_name(sharded.module.get_submodule(name)) for name in sharded.plan.blocks}
    return UnshardedParameterError(
        f"a forward of {class_name(sharded.module)} used parameters of a block that is not gathered: it calls "
        "block.forward(...) where FSDP sees block(...) alone, or reads the block's weights from outside. Blocks are "
        f"{', '.join(sorted(classes)) or 'the whole model'}: have the model call them, name classes that it calls "
        "(--fsdp-wrap), gather all at once (--fsdp-min-num-params above the model's size), or use backend='ddp'"
    )


def _begin_anew(states: Sequence[Any], groups: Sequence[Any]) -> None:
    """Reset torch's state after a refused forward, so that the next one starts like the first."""
    for state in states:
        state._training_state = TrainingState.IDLE
        state._state_ctx.iter_forward_root = None
    for group in groups:
        group._training_state = TrainingState.IDLE


class _Held:
    """The slot of a module that holds a parameter for torch to gather."""

    __slots__ = ("attribute", "name", "parameter", "slots")

    def __init__(self, parameter: Any, name: str) -> None:
        info = parameter._module_info
        self.parameter, self.name = parameter, name
        self.slots: dict[str, Any] = info.module._parameters
        self.attribute: str = info.param_name


def _check(held: Sequence[_Held], refuse: Callable[[str], NoReturn]) -> None:
    for one in held:
        if one.slots.get(one.attribute) is not one.parameter.sharded_param:
            refuse(one.name)


def _look_before_gathering(group: Any, held: Sequence[_Held], refuse: Callable[[str], NoReturn]) -> None:
    unshard = group.unshard

    def look_and_unshard(*args: Any, **kwargs: Any) -> Any:
        if group.is_sharded and group._all_gather_result is None:
            _check(held, refuse)
        return unshard(*args, **kwargs)

    group.unshard = look_and_unshard


def _look_before_first_forward(state: Any, held: Sequence[_Held], refuse: Callable[[str], NoReturn]) -> None:
    """Check parameters before torch reads dtypes and shapes from the modules."""
    begin = state._lazy_init

    def look_and_begin() -> None:
        if state._is_root is None:
            _check(held, refuse)
        begin()

    state._lazy_init = look_and_begin


def _look_before_backward(state: Any, kind: str) -> None:
    begin = state._pre_backward

    def look_and_begin(gradient: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            raise SecondDerivativeError(
                f"a backward through {kind} with create_graph=True, as a gradient penalty takes: FSDP lets gathered "
                "parameters go in backward, and a second one would need them. Use backend='single' or 'ddp'; or "
                "take the penalty of a difference of outputs instead of a gradient"
            )
        return begin(gradient)

    state._pre_backward = look_and_begin
