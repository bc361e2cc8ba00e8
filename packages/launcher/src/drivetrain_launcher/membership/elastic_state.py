"""The messages of an elastic run: the leader writes the state of the run, each node its own status.

Both are small JSON texts in the store, one key for the run and one for each node. A node writes only its own status.
Only the leader, which hosts the store, writes the state of the run. So no two nodes ever write the same key.
"""

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Self

# Why a round ended: a node fell silent, came or left, or the ranks of one failed and are to restart.
Change = Literal["", "lost", "joined", "left", "failed"]
# How a node left: its ranks failed for good, it was stopped by a signal, or its ranks have ended well.
Leave = Literal["", "failed", "stopped", "finished"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Message:
    def to_json(self) -> str:
        """Return the message as text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: bytes | str) -> Self:
        """Return the message from its text."""
        return cls(**json.loads(text))


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberNode(_Message):
    """A node of an elastic run, numbered by arrival: one launcher. A launcher that starts again is a new node."""

    number: int
    host: str
    processes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatus(_Message):
    """The status of a node, sent again and again as a sign of life.

    Attributes:
        count: The number of signs of life so far; the leader watches it change, so that clocks need not agree.
        ready: The round that the node is ready to join; 0 before the node is ready for any round.
        finished: The round in which all ranks of the node ended well; 0 for none.
        left: The way in which the node left; empty while it takes part.
        exit_code: The exit code with which its ranks failed.
        has_seen_end: Whether the node knows that the run is over.
    """

    count: int = 0
    ready: int = 0
    finished: int = 0
    left: Leave = ""
    exit_code: int = 0
    has_seen_end: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticState(_Message):
    """The state of a run, as its leader decides it.

    Attributes:
        round: The number of the newest round, from 1; 0 before the first. Each round starts all ranks again.
        members: The nodes of that round, in the order of their ranks; the leader is the first.
        ranks_port: The port of the store that the ranks of that round use.
        is_over: Whether that round is over, so that every member stops its ranks and gets ready for the next.
        reason: The same reason as a sentence for people.
        closed: The reason why the run is over, as a sentence; empty while it goes on.
        exit_code: The exit code of a run that is over, for the nodes whose ranks have not ended well.
    """

    round: int = 0
    members: tuple[MemberNode, ...] = field(default=())
    ranks_port: int = 0
    is_over: bool = False
    change: Change = ""
    reason: str = ""
    closed: str = ""
    exit_code: int = 0

    @property
    def is_running(self) -> bool:
        """True while the ranks of a round run."""
        return self.round > 0 and not self.is_over and not self.closed

    @property
    def world_size(self) -> int:
        """The number of ranks of the newest round."""
        return sum(node.processes for node in self.members)

    def rank_of(self, number: int) -> int | None:
        """Return the rank of a node in the newest round; None if the node takes no part."""
        return next((rank for rank, node in enumerate(self.members) if node.number == number), None)

    def name_of(self, node: MemberNode) -> str:
        """Return the name of a node for messages, such as "node 1 (host b)"."""
        rank = self.rank_of(node.number)
        return f"a new node (host {node.host})" if rank is None else f"node {rank} (host {node.host})"

    @classmethod
    def from_json(cls, text: bytes | str) -> Self:
        """Return the state from its text."""
        values: dict[str, Any] = json.loads(text)
        members = tuple(MemberNode(**node) for node in values.pop("members"))
        return cls(**values, members=members)
