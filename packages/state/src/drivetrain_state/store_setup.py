"""Meet the other ranks: a store for a new process group, in which no earlier group has left anything.

The store that the ranks reach may outlive their process groups: a launcher's agent hosts it for a whole run. What the
first group of a process left there, such as the addresses of its ranks, is what the second would read: torch gives
the groups of one process the same name after each other. So rank 0 opens a room, numbered from 1, and every rank
enters it; the group's keys stand under the room's number.

Rooms are opened by rank 0 alone, so that a rank that failed, or was started again, and comes a second time finds the
one that the others are in. Where rank 0 hosts the store itself, the store ends with its last group: a rank that comes
to the next meeting before rank 0 has left the last one loses that connection, and looks for the next store.
"""

from contextlib import nullcontext, suppress
from datetime import timedelta
from time import monotonic, sleep

from torch.distributed import DistNetworkError, DistStoreError, PrefixStore, Store, TCPStore

from drivetrain_config.environ import LaunchedRanks
from drivetrain_state.errors import ConnectError
from drivetrain_state.store_probe import StoreProbe

_PREFIX = "drivetrain_meeting"
# How often a rank that waits in a room looks whether rank 0 has opened another.
_LOOK_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 0.25
_SHOWN_RANKS = 8


def meet(launched: LaunchedRanks, *, timeout_seconds: float) -> Store:
    """Wait for all ranks, and return the store for their new process group. Called on all ranks.

    Raises:
        ConnectError: The port is in use, rank 0 was not reached, or a rank has not come; the message names those.
    """
    deadline = monotonic() + timeout_seconds
    while True:
        store = _connection(launched, _left(deadline))
        meeting = PrefixStore(_PREFIX, store)
        try:
            room = _meet_in_room(meeting, launched, deadline)
        except DistStoreError as error:
            raise ConnectError(_who_is_missing(meeting, launched, timeout_seconds)) from error
        except (DistNetworkError, ConnectionError) as error:
            if launched.rank > 0 and not launched.agent_store and monotonic() < deadline:
                continue  # the store of an earlier group has ended, and rank 0 makes the next one
            raise ConnectError(
                f"rank {launched.rank} of {launched.world_size} lost the store at {_address(launched)} while it "
                "waited for the other ranks: its host, rank 0 or the launcher, has ended; its output says why"
            ) from error
        return PrefixStore(f"{_PREFIX}/group/{room}", store)


def _connection(launched: LaunchedRanks, timeout: timedelta) -> TCPStore:
    """Connect to the store of the launcher's agent, or of rank 0, which hosts it if there is no agent."""
    try:
        return TCPStore(
            launched.master_addr,
            launched.master_port,
            is_master=launched.rank == 0 and not launched.agent_store,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=True,
        )
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


def _meet_in_room(meeting: Store, launched: LaunchedRanks, deadline: float) -> int:
    """Return the number of a room in which all ranks are."""
    if launched.rank == 0:
        room = _open_room(meeting, launched.world_size)
        meeting.wait([f"full/{room}"], _left(deadline))
        meeting.set(f"begun/{room}", "")
        return room
    room = 0
    while True:
        newest = _newest_room(meeting, room, deadline)
        if newest != room:
            room = newest
            _enter(meeting, room, launched.rank, launched.world_size)
        left = _left(deadline)
        look = timedelta(seconds=_LOOK_SECONDS)
        with suppress(DistStoreError) if left > look else nullcontext():
            meeting.wait([f"begun/{room}"], min(left, look))
            return room


def _open_room(meeting: Store, world_size: int) -> int:
    """Open a new room, as rank 0 does, and be the first in it."""
    room = meeting.add("rooms", 1)
    _enter(meeting, room, 0, world_size)
    return room


def _newest_room(meeting: Store, entered: int, deadline: float) -> int:
    """Wait until rank 0 has opened a room whose group has not begun without this rank, and return its number.

    Args:
        meeting: The store.
        entered: The room that this rank is in already, which may have begun; 0 for none.
        deadline: When to give up, by the monotonic clock.
    """
    probe = StoreProbe(meeting)
    pause_seconds = 0.01
    try:
        while True:
            probe.check()
            newest = meeting.add("rooms", 0)
            if newest == entered > 0 or (newest > 0 and not meeting.check([f"begun/{newest}"])):
                return newest
            if monotonic() > deadline:
                raise DistStoreError("rank 0 has opened no room")
            sleep(pause_seconds)
            pause_seconds = min(1.5 * pause_seconds, _LONGEST_PAUSE_SECONDS)
    finally:
        probe.close()


def _enter(meeting: Store, room: int, rank: int, world_size: int) -> None:
    """Count a rank in, once; the last one says that the room is full."""
    if meeting.add(f"entered/{room}/{rank}", 1) == 1 and meeting.add(f"entered/{room}", 1) == world_size:
        meeting.set(f"full/{room}", "")


def _left(deadline: float) -> timedelta:
    return timedelta(seconds=max(deadline - monotonic(), 0.001))


def _who_is_missing(meeting: Store, launched: LaunchedRanks, timeout_seconds: float) -> str:
    room = meeting.add("rooms", 0)
    missing = [rank for rank in range(launched.world_size) if not meeting.check([f"entered/{room}/{rank}"])]
    if not missing or launched.rank in missing:
        missing = [0]  # it has opened no room that this rank could enter
    shown = ", ".join(map(str, missing[:_SHOWN_RANKS])) + (", ..." if len(missing) > _SHOWN_RANKS else "")
    who = f"rank {shown}" if len(missing) == 1 else f"ranks {shown}"
    return (
        f"rank {launched.rank} waited {timeout_seconds:.0f} s at {_address(launched)} for all of "
        f"{launched.world_size} ranks, and {who} did not come: check that each was started, that it has not failed, "
        "and that every rank makes the same number of Accelerators, or raise timeout_seconds"
    )


def _address(launched: LaunchedRanks) -> str:
    host = f"[{launched.master_addr}]" if ":" in launched.master_addr else launched.master_addr
    return f"{host}:{launched.master_port}"
