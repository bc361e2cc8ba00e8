"""Blocks that were frozen at their first forward and are trained later, in half precision.

FSDP of torch 2.9 reads the dtypes of gradients off the trainable parameters at the first forward. Where there are
none, it would later hand fp32 parameters half precision gradients, which torch refuses; a discriminator frozen in
the first step runs into it. This room can go when the oldest torch finds the dtypes by itself, as 2.15 does.
"""

from torch.distributed.fsdp import FSDPModule

from drivetrain_backends.fsdp.sharded_model import ShardedModel, parameter_groups


class FrozenBlocks:
    """The blocks whose first forward is still to come, where this torch needs them looked after."""

    def __init__(self) -> None:
        self._waiting: list[FSDPModule] = []

    def add(self, model: ShardedModel) -> None:
        """Look after a model's blocks from now on."""
        self._waiting += [block for block in model.blocks if _needs_care(block)]

    def give_dtypes(self) -> None:
        """Tell blocks that have run their first forward, all frozen, which dtypes their gradients will have."""
        if self._waiting:
            self._waiting = [block for block in self._waiting if not _give(block)]


def _needs_care(block: FSDPModule) -> bool:
    return any("_orig_dtype" in type(group).__annotations__ for group in parameter_groups(block))


def _give(block: FSDPModule) -> bool:
    """Whether a block has its dtypes now."""
    for group in parameter_groups(block):
        if not hasattr(group, "_orig_dtype"):
            return False
        if group._orig_dtype is None:
            group._orig_dtype = group.fsdp_params[0].orig_dtype
            group._reduce_dtype = group.fsdp_params[0].reduce_dtype
    return True
