"""The rendezvous of a plan's nodes: a store hosted by a launcher if their ranks are given, else torch's handler."""

from contextlib import suppress
from datetime import timedelta

from torch.distributed import DistNetworkError, PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousTimeout,
)

from drivetrain_launcher.compat import host_ranks_store_by
from drivetrain_launcher.membership.decision import Limits
from drivetrain_launcher.membership.handler import ElasticMeeting, ElasticNodes
from drivetrain_launcher.membership.roll_call import (
    GivenNodes,
    Meeting,
    StaticNodes,
    enter_by_number,
    missing_numbers,
)
from drivetrain_launcher.plan.launch_plan import LaunchPlan
from drivetrain_state.own_addresses import own_addresses
from drivetrain_state.store_server import host_store

# The first round of an elastic run begins with fewer than its most nodes when none has come for this long.
_GATHER_SECONDS = 5.0
_STORE_TIMEOUT = timedelta(seconds=60)


def rendezvous_of(plan: LaunchPlan) -> RendezvousHandler:
    """Return the handler from which torch's agent gets ranks and a store."""
    if plan.num_nodes == 1:
        return OneNode(plan.master_addr, plan.master_port, plan.rdzv_id)
    if plan.min_nodes is not None:
        limits = Limits(
            min_nodes=plan.min_nodes,
            max_nodes=plan.num_nodes,
            silence_seconds=plan.node_silence_seconds,
            gather_seconds=_GATHER_SECONDS,
            wait_seconds=plan.rdzv_timeout_seconds,
        )
        place = ElasticMeeting(
            address=plan.master_addr,
            port=plan.master_port,
            run_id=plan.rdzv_id,
            processes=plan.processes_per_node,
            limits=limits,
        )
        return ElasticNodes(place)
    meeting = Meeting(
        address=plan.master_addr,
        port=plan.master_port,
        run_id=plan.rdzv_id,
        num_nodes=plan.num_nodes,
        timeout_seconds=plan.rdzv_timeout_seconds,
        hosts=() if plan.placement is None else plan.placement.hosts,
    )
    if plan.rdzv_backend == "static":
        return StaticNodes(meeting, rank=plan.node_rank or 0)
    return AgreeingNodes.at(meeting)


class AgreeingNodes(DynamicRendezvousHandler):
    """Torch's handler of nodes that agree on their ranks, with an error that says who came if some are missing."""

    _meeting: Meeting
    _names: PrefixStore
    _has_entered = False

    @classmethod
    def at(cls, meeting: Meeting) -> "AgreeingNodes":
        """Return the handler of a meeting; a launcher on the meeting's host serves the store."""
        address, port, run_id = meeting.address, meeting.port, meeting.run_id
        store = None
        if any(own_addresses(address)):
            with suppress(DistNetworkError):  # another launcher of this host serves it
                store = host_store(address, port, timeout=_STORE_TIMEOUT, is_one_node=False)
        if store is None:
            store = TCPStore(address, port, timeout=_STORE_TIMEOUT, wait_for_workers=False)
        handler = cls.from_backend(
            run_id,
            store,
            C10dRendezvousBackend(store, run_id),
            min_nodes=meeting.num_nodes,
            max_nodes=meeting.num_nodes,
            timeout=RendezvousTimeout(join=timedelta(seconds=round(meeting.timeout_seconds))),
        )
        host_ranks_store_by(
            handler, lambda address: host_store(address, 0, timeout=_STORE_TIMEOUT, is_one_node=False)
        )
        handler._names, handler._meeting = PrefixStore(run_id, store), meeting
        return handler

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for all nodes. If nodes are missing at the first start, a LaunchError names the others."""
        is_first, self._has_entered = not self._has_entered, True
        if is_first:
            enter_by_number(self._names)
        try:
            return super().next_rendezvous()
        except RendezvousTimeoutError as error:
            if not is_first:
                raise
            raise missing_numbers(self._names, self._meeting, error) from error


class OneNode(GivenNodes):
    """A rendezvous of a single node, which hosts the store that its ranks use.

    With port 0 the store binds a free port chosen by the system, so that two runs never use the same one. Each start
    of the ranks gets a new store, since the earlier one still holds the keys of failed ranks. Restarts use any free
    port, as the first is still bound.
    """

    def __init__(self, address: str, port: int, run_id: str) -> None:
        super().__init__(run_id)
        self._address = address
        self._port = port

    def next_rendezvous(self) -> RendezvousInfo:
        """Host a new store; the agent calls this each time it starts the ranks."""
        store = host_store(self._address, self._port, timeout=_STORE_TIMEOUT, is_one_node=True)
        self._port = 0
        place = RendezvousStoreInfo(self._address, store.port)
        return RendezvousInfo(PrefixStore(self._run_id, store), 0, 1, place)
