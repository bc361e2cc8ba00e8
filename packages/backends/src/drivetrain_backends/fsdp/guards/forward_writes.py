"""Writes of forwards into gathered parameters, which FSDP drops, and steps between a forward and its backward."""

from functools import partial
from typing import Any

from torch import Tensor, nn

from drivetrain_backends.errors import UnshardedParameterError
from drivetrain_backends.fsdp import compat
from drivetrain_backends.fsdp.models.sharded_model import ShardedModel
from drivetrain_backends.modules.parameter_guard import Writes
from drivetrain_backends.modules.wrap_policy import class_name
from drivetrain_messages import list_some


class CountedParameter(nn.Parameter):
    """A gathered parameter whose `.data` counts writes, unlike torch's `.data`."""

    @property
    def data(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The values without autograd."""
        return self.detach()

    @data.setter
    def data(self, values: Tensor) -> None:
        if values is not self:
            self.detach().copy_(values)


class ForwardWrites:
    """A watch for writes into gathered parameters, and for steps between a forward and its backward."""

    def __init__(self, sharded: ShardedModel) -> None:
        self._kind = class_name(sharded.module)
        self._names = {parameter: name for name, parameter in sharded.parameters.items()}
        self._writes: dict[Any, tuple[Tensor | None, Writes]] = {}  # into gathered parameters, by group
        self.num_steps = 0
        self._num_at_forward: dict[Any, int] = {}  # the steps before the last forward, by group
        for block in sharded.blocks:
            groups = compat.parameter_groups(block)
            for group in groups:
                compat.call_after_gathering(group, partial(self._note, group))
            compat.check_before_backward(block, partial(self._refuse_stepped, groups))

    def check(self) -> None:
        """Refuse if gathered parameters were written since the last call."""
        if names := [name for _, writes in self._writes.values() for name in writes.since()]:
            raise UnshardedParameterError(
                f"{list_some(names)} of {self._kind}: a forward, or a hook in backward, wrote "
                "into it, where FSDP drops what is written: it gathers parameters anew for each forward. Write after "
                "the step in its place, inside accelerator.gathered(model, write=True); keep what a forward updates "
                "in a buffer; or use backend='ddp'"
            )

    def _note(self, group: Any) -> None:
        """Count writes to a group's parameters after its first gather, and steps after each of its forwards."""
        first = compat.gathered_parameter(group.fsdp_params[0])
        if group not in self._writes or self._writes[group][0] is not first:
            named = {self._names[p.sharded_param]: compat.gathered_parameter(p) for p in group.fsdp_params}
            for parameter in named.values():
                if type(parameter) is nn.Parameter:  # others are gathered in another form, as in fp8
                    parameter.__class__ = CountedParameter
            self._writes[group] = first, Writes(named)
        if compat.is_in_forward(group):
            self._num_at_forward[group] = self.num_steps

    def _refuse_stepped(self, groups: list[Any]) -> None:
        """Refuse a backward through outputs that were computed before a step."""
        if any(self._num_at_forward.get(group, self.num_steps) != self.num_steps for group in groups):
            raise UnshardedParameterError(
                f"{self._kind} was stepped between a forward and its backward, as in a hook of the forward: FSDP "
                "gathers parameters for both, and gradients of these outputs would be computed with the new "
                "weights. Step after accelerator.backward(loss)"
            )
