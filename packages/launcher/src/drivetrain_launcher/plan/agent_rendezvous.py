"""The rendezvous of a plan's nodes: a store hosted by the launcher for one node, torch's handlers for several."""

from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from drivetrain_launcher.membership.decision import Limits
from drivetrain_launcher.membership.handler import ElasticNodes, Meeting
from drivetrain_launcher.plan.launch_plan import LaunchPlan

# The first round of an elastic run begins with fewer than its most nodes when none has come for this long.
_GATHER_SECONDS = 5.0


def rendezvous_of(plan: LaunchPlan) -> RendezvousHandler:
    """Return the handler from which torch's agent gets ranks and a store."""
    if plan.num_nodes == 1:
        return OneNode(plan.master_addr, plan.master_port, plan.rdzv_id)
    if plan.min_nodes is not None:
        return ElasticNodes(_elastic_meeting(plan, plan.min_nodes))
    host = f"[{plan.master_addr}]" if ":" in plan.master_addr else plan.master_addr
    seconds = round(plan.rdzv_timeout_seconds)
    # The two backends use different names for the timeout.
    wishes: dict[str, Any] = (
        {"rank": plan.node_rank, "timeout": seconds}
        if plan.rdzv_backend == "static"
        else {"join_timeout": seconds}
    )
    return get_rendezvous_handler(
        RendezvousParameters(
            backend=plan.rdzv_backend,
            endpoint=f"{host}:{plan.master_port}",
            run_id=plan.rdzv_id,
            min_nodes=plan.num_nodes,
            max_nodes=plan.num_nodes,
            **wishes,
        )
    )


def _elastic_meeting(plan: LaunchPlan, min_nodes: int) -> Meeting:
    return Meeting(
        address=plan.master_addr,
        port=plan.master_port,
        run_id=plan.rdzv_id,
        processes=plan.processes_per_node,
        limits=Limits(
            min_nodes=min_nodes,
            max_nodes=plan.num_nodes,
            silence_seconds=plan.node_silence_seconds,
            gather_seconds=_GATHER_SECONDS,
            wait_seconds=plan.rdzv_timeout_seconds,
        ),
    )


class OneNode(RendezvousHandler):
    """A rendezvous handler for a single node, which hosts the store that its ranks use.

    With port 0 the store binds a free port chosen by the system, so that two runs never use the same one. Each start
    of the ranks gets a new store, since the earlier one still holds the keys of failed ranks. Restarts use any free
    port, as the first is still bound.
    """

    def __init__(self, address: str, port: int, run_id: str) -> None:
        self._address = address
        self._port = port
        self._run_id = run_id

    @property
    def use_agent_store(self) -> bool:
        """True, since ranks use the store of this process."""
        return True

    def get_backend(self) -> str:
        """Return the name for the agent's events: static, since ranks are fixed."""
        return "static"

    def next_rendezvous(self) -> RendezvousInfo:
        """Host a new store; the agent calls this each time it starts the ranks."""
        store = TCPStore(
            self._address, self._port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
        )
        self._port = 0
        place = RendezvousStoreInfo(self._address, store.port)
        return RendezvousInfo(PrefixStore(self._run_id, store), 0, 1, place)

    def is_closed(self) -> bool:
        """Return False: no other node needs to be turned away."""
        return False

    def set_closed(self) -> None:
        """Do nothing, as there is no other node."""

    def num_nodes_waiting(self) -> int:
        """Return 0, as there is no other node."""
        return 0

    def get_run_id(self) -> str:
        """Return the name of the run."""
        return self._run_id

    def shutdown(self) -> bool:
        """Return True; the store ends with this process."""
        return True
