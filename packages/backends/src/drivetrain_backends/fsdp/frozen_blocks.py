"""A fix for blocks that are frozen at their first forward and trained later, in half precision.

FSDP of torch 2.9 reads the gradient dtypes from the trainable parameters at the first forward. Without any, it later
gives fp32 parameters half-precision gradients, which torch refuses; a discriminator that is frozen in the first step
is such a case. Drop this module once the oldest supported torch finds the dtypes by itself, as 2.15 does.
"""

from weakref import WeakSet

from torch.distributed.fsdp import FSDPModule

from drivetrain_backends.fsdp.compat import give_gradient_dtypes, needs_gradient_dtypes, parameter_groups
from drivetrain_backends.fsdp.sharded_model import ShardedModel


class FrozenBlocks:
    """The blocks that have not run their first forward, if this torch needs the fix."""

    def __init__(self) -> None:
        self._waiting: WeakSet[FSDPModule] = WeakSet()  # a program may drop a model that never ran

    def add(self, model: ShardedModel) -> None:
        """Watch a model's blocks from now on."""
        self._waiting.update(block for block in model.blocks if _needs_care(block))

    def give_dtypes(self) -> None:
        """Set the gradient dtypes of frozen blocks that have run their first forward."""
        if self._waiting:
            self._waiting -= {block for block in self._waiting if _give(block)}


def _needs_care(block: FSDPModule) -> bool:
    return any(map(needs_gradient_dtypes, parameter_groups(block)))


def _give(block: FSDPModule) -> bool:
    """Set a block's gradient dtypes and return whether they are known."""
    return all(map(give_gradient_dtypes, parameter_groups(block)))
