"""Give up a process group whose ranks are at different places in the program, and form another group.

A rank that leaves a step in the middle keeps other ranks in a collective. Gloo cannot end the collective: neither
`abort` nor the end of the group closes connections while a reference holds the group. So a second thread of every
rank closes the connections to the other ranks, and the collective fails.
"""

import os
import socket
from collections.abc import Collection
from contextlib import suppress
from datetime import timedelta
from functools import partial
from time import monotonic

import torch.distributed as dist
from torch.distributed import PrefixStore

from drivetrain_state.compat import default_store
from drivetrain_state.context import Context
from drivetrain_state.errors import ConnectError
from drivetrain_state.rank0_store import control_ports
from drivetrain_state.store_rounds import StoreRounds, wait

Connection = tuple[str, str]  # the address of this end and of the other, as host:port


def between_ranks(own: Collection[Connection], others: Collection[Connection]) -> set[Connection]:
    """Return a rank's connections to other ranks."""
    mirrored = {(there, here) for here, there in others}
    return {one for one in own if one in mirrored}


class GroupRenewal:
    """The means to give up the process group of a context on all ranks, and to form it again.

    Constructed on all ranks. The rendezvous store keeps its connections. ConnectError if the group cannot be formed
    again: the program created it, or a mesh uses it.
    """

    def __init__(self, context: Context) -> None:
        if context.mesh is not None or not context.owns_group:
            raise ConnectError(
                "the process group cannot be formed again, because "
                + ("a mesh stands on it" if context.mesh is not None else "the program created it")
                + ": let Accelerator() connect the ranks, without parallelism="
            )
        self._context = context
        self._store = default_store()
        self._backend = dist.get_backend_config()
        self._number = 0

    def sever(self, rounds: StoreRounds, *, timeout_seconds: float) -> None:
        """Close this rank's connections to the others; a collective that waits on them fails. Called on all ranks.

        Any thread may call this with its own connection to the store.
        """
        topology = self._context.topology
        # The established TCP connections by file number, as Linux lists its files.
        found: dict[int, Connection] = {}
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # no socket, not connected, or closed meanwhile
                with socket.socket(fileno=os.dup(int(name))) as one:
                    if one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM:
                        found[int(name)] = (_address(one.getsockname()), _address(one.getpeername()))
        rounds.post(f"sever/{self._number}/{topology.rank}", sorted(found.values()))
        others: set[Connection] = set()
        deadline = monotonic() + timeout_seconds
        for rank in set(range(topology.world_size)) - {topology.rank}:
            read = partial(rounds.read, f"sever/{self._number}/{rank}")
            posted = wait(read, while_=lambda: monotonic() < deadline)
            others |= {(here, there) for here, there in posted or ()}
        closing = between_ranks(set(found.values()), others)
        ports = {str(port) for port in control_ports(self._context)}
        for number, connection in found.items():
            is_to_store = any(end.rpartition(":")[2] in ports for end in connection)
            if connection in closing and not is_to_store:
                with suppress(OSError):  # it has ended meanwhile, by the other end
                    with socket.socket(fileno=os.dup(number)) as one:
                        one.shutdown(socket.SHUT_RDWR)

    def renew(self) -> None:
        """Form the group again. Called on all ranks, once none of them is in a collective."""
        self._number += 1
        if dist.is_initialized():
            dist.destroy_process_group()
        topology, settings = self._context.topology, self._context.settings
        device = self._context.device
        dist.init_process_group(
            self._backend,
            store=PrefixStore(f"drivetrain_renewed/{self._number}", self._store),
            rank=topology.rank,
            world_size=topology.world_size,
            timeout=timedelta(seconds=settings.timeout_seconds),
            device_id=device if device.type == "cuda" else None,
        )

    def rounds(self) -> StoreRounds:
        """Return a client of the store for one thread, with a separate connection."""
        store = PrefixStore("drivetrain_renewal", self._store.clone())  # the same before and after a renewal
        return StoreRounds(store, rank=self._context.topology.rank)


def _address(name: tuple[str, int]) -> str:
    return f"{name[0].removeprefix('::ffff:')}:{name[1]}"
