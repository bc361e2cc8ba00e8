"""The rendezvous of an elastic run, as torch's agent asks for it."""

import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import DistNetworkError, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo

from drivetrain_launcher.errors import LaunchError
from drivetrain_launcher.membership.bounded_store import BoundedStore, StoreGoneError, StoreSilentError
from drivetrain_launcher.membership.decision import Limits
from drivetrain_launcher.membership.elastic_state import ElasticState, Leave, MemberNode, NodeStatus
from drivetrain_launcher.membership.leader import Leader
from drivetrain_launcher.membership.member import ARRIVED_KEY, NODE_KEY, RUN_KEY, STATUS_KEY, Member
from drivetrain_launcher.membership.roll_call import LaunchersStoreHandler
from drivetrain_launcher.membership.round_store import RoundStore
from drivetrain_state.own_addresses import own_addresses
from drivetrain_state.store_server import host_store

_WAIT_SECONDS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticMeeting:
    """The place of an elastic run in the network, the number of ranks of this node, and the limits of the run."""

    address: str
    port: int
    run_id: str
    processes: int
    limits: Limits


class ElasticNodes(LaunchersStoreHandler):
    """A rendezvous handler for nodes that come and go; the launcher on the store's host leads.

    After this node was frozen, the handler calls `end_ranks`. Each start of the ranks replaces that function.
    """

    def __init__(self, meeting: ElasticMeeting) -> None:
        super().__init__(meeting.run_id)
        self.end_ranks: Callable[[], None] = lambda: None
        self._meeting = meeting
        self._leader: Leader | None = None
        self._server: TCPStore | None = None
        self._member: Member | None = None
        self._round = 0

    @property
    def state(self) -> ElasticState:
        """The state of the run, as this node knows it."""
        return ElasticState() if self._member is None else self._member.state

    @property
    def is_dropped(self) -> bool:
        """True if the others went on without this node, since it was silent or frozen."""
        if self._member is None:
            return False
        return self._member.was_frozen or self._member.state.round > self._round

    @property
    def can_save(self) -> bool:
        """True unless ranks of other nodes are gone or broken, since a save would then never end."""
        state = self.state
        if self.is_dropped or (self._member is not None and self._member.is_lost):
            return False
        return not (state.is_over or state.closed) or state.change in ("joined", "left")

    def get_backend(self) -> str:
        """Return the name for the agent's events."""
        return "c10d"

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the next round of this node; raise RunOverError if the run is over."""
        if self._member is None:
            self._member = self._join()
        member = self._member
        member.ready_for_next()
        while True:
            member.check()
            state = member.state
            rank = state.rank_of(member.node.number)
            if state.is_running and state.round > self._round and rank is not None:
                break
            if state.round >= member.status.ready and (rank is None or state.is_over):
                member.ready_for_next()  # the others began a round without this node
            member.wait(_WAIT_SECONDS)
        self._round = state.round
        place = RendezvousStoreInfo(self._meeting.address, state.ranks_port)
        return RendezvousInfo(RoundStore(member, state.round), rank, len(state.members), place)

    def num_nodes_waiting(self) -> int:
        """Return 1 if the ranks must restart because the nodes have changed, else 0."""
        state = self.state
        return int(self._round > 0 and (self.is_dropped or state.is_over))

    def check(self) -> None:
        """Raise RunOverError if the run is over for this node."""
        if self._member is not None:
            self._member.check()

    def wait_for_change(self, seconds: float) -> None:
        """Wait until the nodes have changed or the run is over, for some seconds at most."""
        if self._member is not None:
            self._member.wait(seconds)

    def finished(self) -> None:
        """Report that all ranks of this node have ended well."""
        if self._member is not None:
            self._member.finished(self._round)

    def leave(self, how: Leave, *, exit_code: int = 0) -> None:
        """Report that this node leaves, and how; later calls change nothing."""
        if self._member is not None:
            self._member.leave(how, exit_code)

    def is_closed(self) -> bool:
        """Return whether the run is over."""
        return bool(self.state.closed)

    def shutdown(self) -> bool:
        """End this node's part; the leader stays until the others know that the run is over."""
        if self._member is None:
            return True
        if self._leader is not None:
            self._leader.wait_until_told()
        self._member.close(seconds=self._meeting.limits.silence_seconds)
        return True

    def _join(self) -> Member:
        """Connect to the store, or host it, and register this node."""
        meeting, seconds = self._meeting, self._meeting.limits.wait_seconds
        is_here = False
        with suppress(OSError, UnicodeError):  # a name without an address, which the connection reports
            is_here = any(own_addresses(meeting.address))
        if is_here:
            timeout = timedelta(seconds=60)
            try:
                self._server = host_store(meeting.address, meeting.port, timeout=timeout, is_one_node=False)
            except DistNetworkError as error:  # another launcher on this host leads
                if "EADDRINUSE" not in str(error) and "already in use" not in str(error):
                    raise
            else:
                self._leader = Leader(
                    lambda: self._connect(60.0), address=meeting.address, limits=meeting.limits
                )
        store = BoundedStore(lambda: self._connect(seconds))
        number = self._arrive(store, seconds)
        node = MemberNode(number=number, host=socket.gethostname(), processes=meeting.processes)
        status = NodeStatus().to_json()
        store.call(lambda tcp: tcp.set(f"{STATUS_KEY}{number}", status), seconds=seconds)
        store.call(lambda tcp: tcp.set(f"{NODE_KEY}{number}", node.to_json()), seconds=seconds)
        if self._server is not None:
            self._server.set(RUN_KEY, meeting.run_id)  # the others come from now on: the leader is the first
        return Member(
            store,
            node,
            silence_seconds=meeting.limits.silence_seconds,
            place=f"{meeting.address}:{meeting.port}",
            fence=lambda: self.end_ranks(),
        )

    def _arrive(self, store: BoundedStore, seconds: float) -> int:
        """Return the number of this node in the order of arrival; a LaunchError if the store is another run's."""
        meeting = self._meeting
        place = f"{meeting.address}:{meeting.port}"

        def run_of(tcp: TCPStore) -> str:
            tcp.wait([RUN_KEY], timedelta(seconds=seconds))
            return tcp.get(RUN_KEY).decode()

        try:
            # Twice the time: to connect, and for a leader that has just begun to say which run it leads.
            run = meeting.run_id if self._leader is not None else store.call(run_of, seconds=2 * seconds)
            if run == meeting.run_id:
                return store.call(lambda tcp: tcp.add(ARRIVED_KEY, 1), seconds=seconds)
        except (StoreGoneError, StoreSilentError) as error:
            raise LaunchError(
                f"the store of run {meeting.run_id!r} at {place} did not answer within {seconds:g} s: start the "
                f"launcher on the host with that address, and check that the port is reachable ({error})"
            ) from error
        raise LaunchError(
            f"--rdzv-id {meeting.run_id}: the store at {place} belongs to run {run!r}; say its name to take part in "
            "it, or another --master-port"
        )

    def _connect(self, seconds: float) -> TCPStore:
        timeout = timedelta(seconds=seconds)
        return TCPStore(self._meeting.address, self._meeting.port, timeout=timeout, wait_for_workers=False)
