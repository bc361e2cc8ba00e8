"""Writes into gathered parameters: FSDP drops them, as it gathers anew for each forward.

FSDP's own gathers count as no write, so the count of a gathered parameter changes by other code alone. What goes
through `.data` is not counted; the values are compared with the shard until the first step.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from drivetrain_backends.errors import UnshardedParameterError, first_of
from drivetrain_backends.fsdp.compat import check_before_resharding, gathered_parameter, parameter_groups
from drivetrain_backends.fsdp.sharded_model import ShardedModel
from drivetrain_backends.modules.parameter_writes import Writes
from drivetrain_backends.modules.wrap_policy import class_name
from drivetrain_backends.state_dict.dtensor import local, own_part


class ForwardWrites:
    """The writes of a model's forwards, and of hooks in its backwards, into gathered parameters.

    Args:
        sharded: The sharded model.
    """

    def __init__(self, sharded: ShardedModel) -> None:
        self._sharded = sharded
        self._names = {parameter.sharded_param: place for place, parameter in _named(sharded)}
        self._found: dict[str, None] = {}
        self._writes: Writes | None = None
        self._stop = [
            check_before_resharding(group, partial(self._compare, group.fsdp_params))
            for block in sharded.blocks
            for group in parameter_groups(block)
        ]

    def check(self, *, counts: bool) -> None:
        """Refuse writes that were found by now.

        Args:
            counts: Whether to read the counts too.

        Raises:
            UnshardedParameterError: There are such writes.
        """
        if counts:
            if self._writes is not None:
                self._found |= dict.fromkeys(self._writes.since())
            self._writes = Writes({name: gathered_parameter(p) for name, p in _named(self._sharded)})
        if self._found:
            names, self._found = list(self._found), {}
            raise UnshardedParameterError(
                f"{first_of(names)} of {class_name(self._sharded.module)}: a forward, or a hook in backward, wrote "
                "into it, where FSDP drops what is written: it gathers parameters anew for each forward. Write after "
                "the step in its place, inside accelerator.gathered(model, write=True); keep what a forward updates "
                "in a buffer; or use backend='ddp'"
            )

    def end_comparing(self) -> None:
        """Compare no values from now on: a model has trained its first step."""
        while self._stop:
            self._stop.pop()()

    def _compare(self, parameters: list[Any]) -> None:
        if not self._sharded.module.training:
            return
        with torch.no_grad():
            for parameter in parameters:
                whole, shard = gathered_parameter(parameter), parameter.sharded_param
                if whole is not None and _differ(whole, shard):
                    self._found[self._names[shard]] = None


def _named(sharded: ShardedModel) -> list[tuple[str, Any]]:
    """Return torch's own object for each sharded parameter, with its name."""
    names = {parameter: name for name, parameter in sharded.parameters.items()}
    return [(names[parameter.sharded_param], parameter) for parameter in sharded.divided()]


def _differ(whole: Tensor, shard: Tensor) -> bool:
    """Return whether a gathered parameter has other values than this rank's shard of it."""
    own = local(shard)
    if type(whole.data) is not Tensor or type(own) is not Tensor or whole.shape != shard.shape:
        return False  # gathered in another form, as in fp8
    part = own_part(whole.detach(), shard)
    return not torch.equal(part, own.to(part.device, part.dtype)) and not bool(part.isnan().any())
