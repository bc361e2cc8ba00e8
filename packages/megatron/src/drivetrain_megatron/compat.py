"""The private names of Megatron-Core and torch that are relied on; tests/megatron/test_compat.py pins them."""

from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from drivetrain_megatron.library import moe_utils, parallel_state

# As torch names what `get_extra_state` returns, which is None in Megatron's layers.
EXTRA_STATE = "_extra_state"


def own_groups() -> list[ProcessGroup]:
    """Return the groups that Megatron has made with this rank in them, of which it destroys only some."""
    found: Any = parallel_state._global_process_group_list  # pyright: ignore[reportPrivateUsage]
    return [group for group in found or () if group is not None]


def is_alive(group: ProcessGroup) -> bool:
    """Return whether a group has not been destroyed."""
    world: Any = dist.distributed_c10d._world  # pyright: ignore[reportPrivateUsage]
    return dist.is_initialized() and group in world.pg_map


def routes_tokens() -> bool:
    """Return whether Megatron's routers run: 0.16.1 asks for a name that it has with Transformer Engine alone."""
    return hasattr(moe_utils, "te_general_gemm")
