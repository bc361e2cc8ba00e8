"""Wait for the other ranks, and set up a store for a new process group, free of the keys of earlier groups.

The store may outlive process groups: a launcher's agent hosts it for a whole run. Since torch gives successive groups
of one process the same name, a second group would read the keys of the first, such as the addresses of its ranks.
Therefore rank 0 opens a room, numbered from 1, and every rank enters it; the room's number prefixes the group's keys.

Only rank 0 opens rooms: a rank that tries again, after a failure or a restart, finds the other ranks' room. If rank 0
hosts the store itself, the store ends with its last group. A rank that arrives early for the next group then loses
its connection, and connects to the next store.
"""

import os
from contextlib import closing, nullcontext, suppress
from datetime import timedelta
from time import monotonic

from torch.distributed import DistNetworkError, DistStoreError, PrefixStore, Store, TCPStore

from drivetrain_config.environ import RankEnvironment
from drivetrain_messages import list_some
from drivetrain_state.errors import ConnectError
from drivetrain_state.process_identity import process_identity, runs_beside
from drivetrain_state.store_rounds import StoreProbe, wait
from drivetrain_state.store_server import host_store

_PREFIX = "drivetrain_meeting"
# The interval at which a rank that waits in a room checks whether rank 0 has opened another.
_LOOK = timedelta(seconds=1)
_SHOWN_RANKS = 8


def meet(launched: RankEnvironment, *, timeout_seconds: float) -> Store:
    """Wait for all ranks, and return the store for their new process group. Called on all ranks.

    ConnectError if the port is in use, rank 0 cannot be reached, or ranks are missing.
    """
    deadline = monotonic() + timeout_seconds
    while True:
        store = _connection(launched, _left(deadline))
        meeting = PrefixStore(_PREFIX, store)
        try:
            room = _meet_in_room(meeting, launched, deadline)
        except DistStoreError as error:
            ranks, newest = range(launched.world_size), meeting.add("rooms", 0)
            missing = [rank for rank in ranks if not meeting.check([f"entered/{newest}/{rank}"])]
            if not missing or launched.rank in missing:
                missing = [0]  # rank 0 has opened no room that this rank could enter
            shown = list_some(missing, most=_SHOWN_RANKS)
            raise ConnectError(
                f"rank {launched.rank} waited {timeout_seconds:.0f} s at {_address(launched)} for all of "
                f"{launched.world_size} ranks, and {'rank' if len(missing) == 1 else 'ranks'} {shown} did not come: "
                "check that each was started, that it has not failed, and that every rank makes the same number of "
                "Accelerators, or raise timeout_seconds"
            ) from error
        except (DistNetworkError, ConnectionError) as error:
            if launched.rank > 0 and not launched.agent_store and monotonic() < deadline:
                continue  # the store of an earlier group has ended; rank 0 creates the next one
            raise ConnectError(
                f"rank {launched.rank} of {launched.world_size} lost the store at {_address(launched)} while it "
                "waited for the other ranks: its host, rank 0 or the launcher, has ended; its output says why"
            ) from error
        return PrefixStore(f"{_PREFIX}/group/{room}", store)


def _connection(launched: RankEnvironment, timeout: timedelta) -> TCPStore:
    try:
        if launched.rank == 0 and not launched.agent_store:
            return host_store(
                launched.master_addr,
                launched.master_port,
                timeout=timeout,
                is_one_node=launched.num_nodes == 1,
                multi_tenant=True,  # it may connect again while this process still hosts an earlier store
            )
        return TCPStore(launched.master_addr, launched.master_port, timeout=timeout, wait_for_workers=False)
    except DistNetworkError as error:
        address = _address(launched)
        if "EADDRINUSE" in str(error):
            raise ConnectError(
                f"rank 0 cannot listen on {address}: the port is in use. Another run may hold it: choose another "
                "with --master-port"
            ) from error
        raise ConnectError(
            f"rank {launched.rank} of {launched.world_size} could not reach rank 0 at {address}: check that it was "
            "started, and that the address and port are reachable from this node"
        ) from error


def _meet_in_room(meeting: Store, launched: RankEnvironment, deadline: float) -> int:
    """Enter a room, wait until all ranks are in it, and return its number."""
    if launched.rank == 0:
        room = meeting.add("rooms", 1)
        _enter(meeting, room, 0, launched.world_size)
        meeting.wait([f"full/{room}"], _left(deadline))
        meeting.set(f"begun/{room}", "")
        return room
    room = 0
    while True:
        newest = _wait_for_room(meeting, room, deadline)
        if newest != room:
            room = newest
            _enter(meeting, room, launched.rank, launched.world_size)
        left = _left(deadline)
        # A wait that ends before the deadline is no error, but time to look for a newer room.
        with suppress(DistStoreError) if left > _LOOK else nullcontext():
            meeting.wait([f"begun/{room}"], min(left, _LOOK))
            return room


def _wait_for_room(meeting: Store, entered: int, deadline: float) -> int:
    """Wait for a room that this rank can still join, and return the room's number, which may be `entered`."""

    def find() -> int | None:
        probe.check()
        newest = meeting.add("rooms", 0)
        is_open = newest > 0 and not meeting.check([f"begun/{newest}"])
        return newest if is_open or newest == entered > 0 else None

    with closing(StoreProbe(meeting)) as probe:
        newest = wait(find, while_=lambda: monotonic() < deadline)
    if newest is None:
        raise DistStoreError("rank 0 has opened no room")
    return newest


def _enter(meeting: Store, room: int, rank: int, world_size: int) -> None:
    """Register a rank in a room, once; the last rank marks the room as full."""
    key = f"entered/{room}/{rank}"
    first = meeting.add(f"{key}/count", 1) == 1
    holder = meeting.compare_set(key, "", process_identity()).decode()
    if (other := runs_beside(holder)) is not None:
        raise ConnectError(
            f"process {os.getpid()} cannot be rank {rank} of {world_size}: process {other} of this host came first "
            "as that rank; one may be a child of the other, which inherits RANK. Start it without RANK, LOCAL_RANK "
            "and WORLD_SIZE in its environment, or by `drivetrain launch`"
        )
    if first and meeting.add(f"entered/{room}", 1) == world_size:
        meeting.set(f"full/{room}", "")


def _left(deadline: float) -> timedelta:
    return timedelta(seconds=max(deadline - monotonic(), 0.001))


def _address(launched: RankEnvironment) -> str:
    host = f"[{launched.master_addr}]" if ":" in launched.master_addr else launched.master_addr
    return f"{host}:{launched.master_port}"
