"""A store for the ranks' background threads, which outlives a killed launcher."""

from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore

from drivetrain_state.compat import default_store
from drivetrain_state.context import Context
from drivetrain_state.errors import ConnectError
from drivetrain_state.own_addresses import own_addresses
from drivetrain_state.store_rounds import underlying_store
from drivetrain_state.store_server import host_store


def control_store(context: Context, prefix: str) -> Store | None:
    """Return a separate connection to a store of the ranks, with a prefix; None for a single process.

    A background thread uses the store in place of collectives, since collectives of two threads could deadlock across
    ranks. Called on all ranks, with the same prefix. Drop the connection before the process ends.
    """
    if context.topology.world_size == 1:
        return None
    if context.group is None:
        raise ConnectError("there is no process group whose store the ranks share: use connect()")
    if not context.control:
        context.control.append(_make_control_store(context))
    return PrefixStore(prefix, context.control[0].clone())


def control_ports(context: Context) -> set[int]:
    """Return the ports of the store servers that this process is connected to."""
    stores = map(underlying_store, (default_store(), *context.control))
    return {store.port for store in stores if isinstance(store, TCPStore)}


def _make_control_store(context: Context) -> Store:
    """Return a store that rank 0 hosts, so that ranks whose launcher is killed can still agree to save and end.

    If rank 0 and the rendezvous store's server run on different hosts, the other ranks know no address of rank 0. The
    rendezvous store is then used instead, as for a group without TCPStore.
    """
    shared = default_store()
    place, timeout = underlying_store(shared), timedelta(seconds=context.settings.timeout_seconds)
    if not isinstance(place, TCPStore):
        return shared
    # Several contexts may follow each other on one group: each rank counts its own, and the same ones meet.
    number = shared.add(f"drivetrain_control/of_rank_{context.topology.rank}", 1)
    port_key = f"drivetrain_control/{number}/port"
    if context.topology.is_main:
        is_here, is_one_node = any(own_addresses(place.host)), context.topology.num_nodes == 1
        store = host_store(place.host, 0, timeout=timeout, is_one_node=is_one_node) if is_here else None
        shared.set(port_key, "" if store is None else str(store.port))
        return store or shared
    port = shared.get(port_key).decode()
    return TCPStore(place.host, int(port), timeout=timeout, wait_for_workers=False) if port else shared
