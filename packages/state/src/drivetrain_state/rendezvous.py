"""The store that all ranks share, for a thread beside the main one."""

from torch.distributed import PrefixStore, Store
from torch.distributed.distributed_c10d import _get_default_store  # pyright: ignore[reportPrivateUsage]

from drivetrain_state.context import Context
from drivetrain_state.errors import ConnectError


def side_store(context: Context, prefix: str) -> Store | None:
    """A connection of its own to the ranks' rendezvous store; None in one process.

    Collectives belong to the main thread: two threads would wait for each other across ranks. And a main thread that
    waits on the group's own store holds its lock. Whoever holds a connection must let go of it before the process
    ends.

    Args:
        context: This process among the others.
        prefix: What the keys begin with, the same on all ranks.

    Raises:
        ConnectError: The process group has ended.
    """
    if context.topology.world_size == 1:
        return None
    if context.group is None:
        raise ConnectError("there is no process group whose store the ranks share: use connect()")
    return PrefixStore(prefix, _get_default_store().clone())
