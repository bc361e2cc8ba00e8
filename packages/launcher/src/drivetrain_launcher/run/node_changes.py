"""The reactions of an elastic run's agent to nodes that come, go or fall silent."""

import time
from collections.abc import Collection, Sequence
from functools import partial

from drivetrain_clusters.protocol import RESUME_EXIT_CODE
from drivetrain_launcher.membership.handler import ElasticNodes
from drivetrain_launcher.plan.launch_plan import LaunchPlan
from drivetrain_launcher.run.failures import RankFailure
from drivetrain_launcher.run.keeper.sessions import kill_sessions
from drivetrain_messages import format_count, say

# The time that ranks have to end when they cannot save: a save takes the ranks of all nodes.
_SHORT_STOP_SECONDS = 2.0
# The time beyond the silence after which a change of the nodes is known everywhere.
_NEWS_SECONDS = 3.0
# Exit codes that another node's end may cause: a save that all ranks agreed on, or a watchdog's.
_CAUSED_CODES = (RESUME_EXIT_CODE, 124)
# A stop by the launcher, and NCCL's watchdog, which aborts its process.
_CAUSED_SIGNALS = ("SIGTERM", "SIGABRT")


class NodeChanges:
    """The effects of node changes on the agent of one node, which takes part by `nodes`."""

    def __init__(self, nodes: ElasticNodes, plan: LaunchPlan) -> None:
        self.nodes = nodes
        self._silence_seconds = plan.node_silence_seconds
        self._shutdown_seconds = plan.shutdown_timeout_seconds
        self._num_nodes = 0

    def started(self, pids: Collection[int]) -> None:
        """Note the ranks that were started, and say with which nodes the run goes on."""
        self.nodes.end_ranks = partial(kill_sessions, tuple(pids))
        state, before = self.nodes.state, self._num_nodes
        self._num_nodes = len(state.members)
        size = f"{format_count(self._num_nodes, 'node')} ({format_count(state.world_size, 'process')})"
        if before == 0:
            say(f"{'the run goes on' if state.round > 1 else 'the run begins'} with {size}")
        else:
            count = format_count(self._num_nodes, "node")
            if self._num_nodes < before:
                count = f"{self._num_nodes} of {before} nodes"
            say(
                f"{state.reason}; going on with {count} ({format_count(state.world_size, 'process')}), whose ranks "
                "start again from their newest checkpoint"
            )

    def caused(self, failures: Sequence[RankFailure]) -> bool:
        """Wait for the leader's news, and return whether the failures only follow from changed nodes."""
        # The ranks of a node that was frozen are killed, whatever they ended with.
        if self.nodes.is_dropped:
            return True
        for failure in failures:
            is_stop = failure.signal in _CAUSED_SIGNALS and not failure.error
            if not (failure.is_aftermath or failure.exit_code in _CAUSED_CODES or is_stop):
                return False
        seconds = self._silence_seconds + _NEWS_SECONDS
        if any(failure.exit_code == RESUME_EXIT_CODE for failure in failures):
            seconds = _NEWS_SECONDS  # who stops the ranks says so before they save
        deadline = time.monotonic() + seconds
        while not self.nodes.num_nodes_waiting() and time.monotonic() < deadline:
            self.nodes.check()
            self.nodes.wait_for_change(0.2)
        self.nodes.check()
        if not self.nodes.num_nodes_waiting():
            return False
        return self.nodes.is_dropped or self.nodes.state.change != "failed"

    def stop_seconds(self) -> float:
        """Return the time that the ranks have to end: enough to save only if the ranks of all nodes can save."""
        return self._shutdown_seconds if self.nodes.can_save else _SHORT_STOP_SECONDS

    def say_why_restart(self) -> None:
        """Say why the ranks are stopped, provided that the nodes have changed."""
        if self.nodes.is_dropped:
            say(
                "this node was frozen or silent, and the others went on without it: its ranks are stopped, and it "
                "takes part again"
            )
        elif (state := self.nodes.state).is_over and state.change in ("joined", "left"):
            say(
                f"{state.reason}: the ranks have {self._shutdown_seconds:g} s to save before they start again"
            )
