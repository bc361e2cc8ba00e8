"""Decide the next state of a run when its nodes change, from the facts that the leader knows. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from drivetrain_launcher.membership.elastic_state import ElasticState, MemberNode, NodeStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of a run.

    Attributes:
        min_nodes: The fewest nodes with which the run goes on.
        max_nodes: The most nodes; further nodes wait until a member is gone.
        silence_seconds: The time without a sign of life after which a node is lost.
        gather_seconds: The time without an arrival after which the first round begins with fewer than max_nodes.
        wait_seconds: The time that a run waits for min_nodes nodes before it ends.
    """

    min_nodes: int
    max_nodes: int
    silence_seconds: float
    gather_seconds: float
    wait_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A node as the leader knows it: its last status, and the time since that status came."""

    node: MemberNode
    status: NodeStatus
    silent_seconds: float


def decide(
    state: ElasticState,
    peers: Sequence[Peer],
    limits: Limits,
    *,
    gathering_seconds: float,
    quiet_seconds: float,
) -> ElasticState:
    """Return the next state of a run; the same state if nothing changes.

    `peers` are all nodes that ever came, in the order of their arrival; the first is the leader. The run has been
    gathering since its last round ended, or since it began; it has been quiet since the last node came.
    """
    if state.closed:
        return state
    leader = peers[0] if peers else None
    for peer in peers:
        takes_part = peer is leader or state.rank_of(peer.node.number) is not None
        if peer.status.left == "failed" and takes_part:
            code = peer.status.exit_code
            closed = f"the ranks of {state.name_of(peer.node)} ended with exit code {code}"
            return replace(state, closed=closed, change="failed", exit_code=code or 1)
    if leader is not None and leader.status.left == "stopped":
        closed = f"{state.name_of(leader.node)}, which hosts the store of the run, was stopped"
        return replace(state, closed=closed, change="left", exit_code=1)
    if state.is_running:
        return _watch(state, peers, limits)
    return _gather(state, peers, limits, gathering_seconds, quiet_seconds)


def _watch(state: ElasticState, peers: Sequence[Peer], limits: Limits) -> ElasticState:
    """Return the state after a look at the nodes of a running round."""
    members = [peer for peer in peers if state.rank_of(peer.node.number) is not None]
    unfinished = [peer for peer in members if peer.status.finished < state.round]
    if not unfinished:
        return replace(state, closed="the ranks of all nodes have ended well")
    gone = [peer for peer in unfinished if peer.status.left or peer.silent_seconds > limits.silence_seconds]
    if gone and len(unfinished) < len(members):
        reason = f"{_explain_absence(state, gone[0])} while the ranks of other nodes had ended"
        return replace(state, closed=reason, change="lost", exit_code=1)
    if gone:
        change = "left" if all(peer.status.left for peer in gone) else "lost"
        return replace(
            state,
            is_over=True,
            change=change,
            reason=", ".join(_explain_absence(state, peer) for peer in gone),
        )
    if restarting := [peer for peer in members if peer.status.ready > state.round]:
        who = state.name_of(restarting[0].node)
        return replace(state, is_over=True, change="failed", reason=f"{who} restarts its ranks")
    # A node that thaws shows signs of life before its ranks are stopped and it is ready.
    came = [
        peer
        for peer in peers
        if peer not in members and peer.status.ready > state.round and is_alive(peer, limits)
    ]
    if came and len(members) < limits.max_nodes and len(unfinished) == len(members):
        reason = f"{state.name_of(came[0].node)} came"
        return replace(state, is_over=True, change="joined", reason=reason)
    return state


def _gather(
    state: ElasticState, peers: Sequence[Peer], limits: Limits, gathering_seconds: float, quiet_seconds: float
) -> ElasticState:
    """Return a new round if enough nodes are alive and all of them are ready; else the unchanged state."""
    alive = [peer for peer in peers if is_alive(peer, limits)]
    ready = [peer for peer in alive if peer.status.ready > state.round]
    is_settled = state.round > 0 or quiet_seconds >= limits.gather_seconds
    if len(ready) == len(alive) >= limits.min_nodes and (len(ready) >= limits.max_nodes or is_settled):
        # The leader stays first: rank 0 commits checkpoints, and is never on a host that the run went on without.
        # Then come members of the last round, in their order, and nodes as they came.
        def place(peer: Peer) -> tuple[bool, bool, int, int]:
            rank = state.rank_of(peer.node.number)
            return peer is not peers[0], rank is None, rank or 0, peer.node.number

        order = sorted(ready, key=place)
        members = tuple(peer.node for peer in order[: limits.max_nodes])
        return replace(state, round=state.round + 1, members=members, is_over=False, ranks_port=0)
    if len(alive) < limits.min_nodes and gathering_seconds > limits.wait_seconds:
        before = f" ({state.reason})" if state.reason else ""
        came = f"{len(alive)} of at least {limits.min_nodes} nodes came within {limits.wait_seconds:g} s"
        return replace(state, closed=f"{came}{before}", exit_code=1)
    return state


def is_alive(peer: Peer, limits: Limits) -> bool:
    """Return whether a node shows signs of life and has not left."""
    is_silent = peer.silent_seconds > limits.silence_seconds
    return not (is_silent or peer.status.left or peer.status.finished)


def _explain_absence(state: ElasticState, peer: Peer) -> str:
    who = state.name_of(peer.node)
    if peer.status.left:
        return f"{who} was stopped"
    return f"{who} has been silent for {peer.silent_seconds:.0f} s"
