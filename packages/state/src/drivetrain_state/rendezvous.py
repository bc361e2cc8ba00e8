"""The store that all ranks share, for use by a background thread."""

from torch.distributed import PrefixStore, Store
from torch.distributed.distributed_c10d import _get_default_store  # pyright: ignore[reportPrivateUsage]

from drivetrain_state.context import Context
from drivetrain_state.errors import ConnectError


def control_store(context: Context, prefix: str) -> Store | None:
    """Return a separate connection to the ranks' rendezvous store; None for a single process.

    A background thread uses it in place of collectives, which belong to the main thread, as those of two threads
    could deadlock across ranks. The group's own store is locked while the main thread waits on it. Drop the
    connection before the process ends.

    Args:
        context: The context of this process.
        prefix: The prefix of the keys, the same on all ranks.

    Raises:
        ConnectError: If the process group does not exist or has been destroyed.
    """
    if context.topology.world_size == 1:
        return None
    if context.group is None:
        raise ConnectError("there is no process group whose store the ranks share: use connect()")
    return PrefixStore(prefix, _get_default_store().clone())
