"""The meeting of a known number of nodes. If some are missing, each node that came reports which nodes came."""

import os
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import DistNetworkError, DistStoreError, PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from drivetrain_launcher.errors import LaunchError
from drivetrain_messages import list_some
from drivetrain_state.store_server import host_store

_PREFIX = "drivetrain_roll_call"
_ALL = "all"
# What the verdict takes from node 0 to the others, on top of the time that nodes wait for each other.
_GRACE_SECONDS = 10.0
_MOST_NAMED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """A meeting of nodes at a port of node 0, which wait some seconds for each other.

    `hosts` has each node's host name by rank, for error messages; it is empty if the names are unknown.
    """

    address: str
    port: int
    run_id: str
    num_nodes: int
    timeout_seconds: float
    hosts: tuple[str, ...] = ()

    def name(self, rank: int) -> str:
        """Return a node's rank, with its host if it is known."""
        return f"node {rank} ({self.hosts[rank]})" if self.hosts else f"node {rank}"

    def describe(self, came: Sequence[str], missing: Sequence[str]) -> str:
        """Return the error message with the names of the nodes that came, and of the missing ones."""
        return (
            f"{len(came)} of {self.num_nodes} nodes came to {self.address}:{self.port} within "
            f"{self.timeout_seconds:g} s: {_list_names(came)}. Missing: {_list_names(missing)}; look at the output "
            "there, and check that drivetrain launch started, with the same --master-addr and --master-port, and "
            "that this port can be reached from there"
        )


class LaunchersStoreHandler(RendezvousHandler):
    """A rendezvous handler whose ranks use the store of a launcher, and whose run no node closes on request."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id

    @property
    def use_agent_store(self) -> bool:
        """True, since ranks use the store of a launcher."""
        return True

    def set_closed(self) -> None:
        """Do nothing: the launchers decide when their run is over."""

    def get_run_id(self) -> str:
        """Return the name of the run."""
        return self._run_id


class GivenNodes(LaunchersStoreHandler):
    """A rendezvous of nodes that are given: none joins later, and the store ends with the process that hosts it."""

    def get_backend(self) -> str:
        """Return the name for the agent's events: static."""
        return "static"

    def is_closed(self) -> bool:
        """Return False: nobody is turned away."""
        return False

    def num_nodes_waiting(self) -> int:
        """Return 0, as no node joins later."""
        return 0

    def shutdown(self) -> bool:
        """Return True: there is nothing to shut down."""
        return True


class StaticNodes(GivenNodes):
    """A rendezvous of several nodes with given ranks over a store that node 0 hosts."""

    def __init__(self, meeting: Meeting, *, rank: int) -> None:
        super().__init__(meeting.run_id)
        self._meeting = meeting
        self._rank = rank
        self._store: Store | None = None

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for all nodes; raise LaunchError if a node is missing, ranks repeat, or node 0 cannot answer."""
        meeting = self._meeting
        address, port, timeout = meeting.address, meeting.port, timedelta(seconds=meeting.timeout_seconds)
        if self._store is None:
            if self._rank == 0:
                self._store = host_store(address, port, timeout=timeout, is_one_node=False, multi_tenant=True)
            else:
                try:
                    self._store = TCPStore(address, port, timeout=timeout, wait_for_workers=False)
                except (DistNetworkError, DistStoreError) as error:
                    raise LaunchError(
                        f"the {meeting.num_nodes} nodes did not meet at {address}:{port} within "
                        f"{meeting.timeout_seconds:g} s: node {self._rank}, this one, could not reach "
                        f"{meeting.name(0)}; look at the output there, and check that this is its address and that "
                        "the port can be reached from here"
                    ) from error
            self._call_roll(PrefixStore(_PREFIX, PrefixStore(meeting.run_id, self._store)))
        store = PrefixStore(meeting.run_id, self._store)
        return RendezvousInfo(store, self._rank, meeting.num_nodes, RendezvousStoreInfo(address, port))

    def _call_roll(self, store: Store) -> None:
        meeting, me = self._meeting, f"{socket.gethostname()}, process {os.getpid()}"
        count = store.compare_set("num_nodes", "", str(meeting.num_nodes)).decode()
        if count != str(meeting.num_nodes):
            raise LaunchError(
                f"this node expects {meeting.num_nodes} nodes, but another node of run {meeting.run_id!r} "
                f"expects {count}: say the same --num-nodes on all, or another --master-port for another run"
            )
        if store.add(f"taken/{self._rank}", 1) > 1:
            other = store.get(f"node/{self._rank}").decode()
            raise LaunchError(
                f"--node-rank {self._rank}: another node came with this rank ({other}; this one is {me}): say "
                "another rank on each node, or another --master-port for another run"
            )
        store.set(f"node/{self._rank}", me)
        if self._rank == 0:
            self._judge(store)
            return
        try:
            store.wait(["verdict"], timedelta(seconds=meeting.timeout_seconds + _GRACE_SECONDS))
            verdict = store.get("verdict").decode()
            if verdict != _ALL:
                store.add("heard", 1)
        except (DistNetworkError, DistStoreError, ConnectionError) as error:
            raise LaunchError(
                f"{meeting.name(0)} at {meeting.address}:{meeting.port} left before all of {meeting.num_nodes} nodes "
                "came; its output says why"
            ) from error
        if verdict != _ALL:
            raise LaunchError(verdict)

    def _judge(self, store: Store) -> None:
        """Wait for all nodes on node 0, and tell them which came; raise LaunchError if some are missing."""
        meeting = self._meeting
        keys = [f"node/{rank}" for rank in range(meeting.num_nodes)]
        try:
            # The server answers as the last node comes: rounds that poll would add a fifth of a second to the start.
            store.wait(keys, timedelta(seconds=meeting.timeout_seconds))
        except DistStoreError:
            came = [rank for rank, key in enumerate(keys) if store.check([key])]
            hosts = [f"{meeting.name(rank)} on {store.get(keys[rank]).decode()}" for rank in came]
            missing = [meeting.name(rank) for rank in range(meeting.num_nodes) if rank not in came]
            verdict = meeting.describe(hosts, missing)
            store.set("verdict", verdict)
            # Keep the store until the others have read why the meeting failed, or the grace is over.
            deadline = time.monotonic() + _GRACE_SECONDS
            with suppress(DistNetworkError, DistStoreError):
                while store.add("heard", 0) < len(came) - 1 and time.monotonic() < deadline:
                    time.sleep(0.05)
            raise LaunchError(verdict) from None
        store.set("verdict", _ALL)


def enter_by_number(store: Store) -> None:
    """Take the next number in a store of nodes without ranks, and write this node's name there."""
    number = store.add(f"{_PREFIX}/came", 1)
    store.set(f"{_PREFIX}/name/{number}", f"{socket.gethostname()}, process {os.getpid()}")


def missing_numbers(store: Store, meeting: Meeting, error: RendezvousTimeoutError) -> LaunchError:
    """Return the error of a meeting without ranks to which not all nodes came."""
    count = store.add(f"{_PREFIX}/came", 0)
    came = [store.get(f"{_PREFIX}/name/{number}").decode() for number in range(1, count + 1)]
    if count >= meeting.num_nodes:
        return LaunchError(
            f"{count} nodes came to {meeting.address}:{meeting.port} ({_list_names(came)}), but did not agree on the "
            f"{meeting.num_nodes} of the run within {meeting.timeout_seconds:g} s ({error}): some left again; their "
            "output says why"
        )
    absent = [host for host in meeting.hosts if not any(name.startswith(f"{host},") for name in came)]
    known = absent if len(absent) == meeting.num_nodes - count else []
    return LaunchError(meeting.describe(came, known or [f"{meeting.num_nodes - count} without a name"]))


def _list_names(names: Sequence[str]) -> str:
    return list_some(names, most=_MOST_NAMED) or "none"
