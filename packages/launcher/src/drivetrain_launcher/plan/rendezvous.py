"""How the nodes of a plan meet: one node by itself, on a port that nobody else can have; several as torch does it."""

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

from drivetrain_launcher.plan.plan import LaunchPlan


def rendezvous_of(plan: LaunchPlan) -> RendezvousHandler:
    """The handler that torch's agent asks for ranks and a store."""
    if plan.num_nodes == 1:
        return OneNode(plan.master_addr, plan.master_port, plan.rdzv_id)
    host = f"[{plan.master_addr}]" if ":" in plan.master_addr else plan.master_addr
    seconds = round(plan.rdzv_timeout_seconds)
    # The two backends call the same wish differently.
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


class OneNode(RendezvousHandler):
    """A node that meets nobody: it hosts the store that its ranks use.

    Port 0 lets the system choose a free port while the store binds it, so that two runs never ask for the same one.
    Each start of the ranks gets a store of its own, since an earlier one holds what failed ranks left in it; from
    the second on its port is any free one, for the first is still bound.
    """

    def __init__(self, address: str, port: int, run_id: str) -> None:
        self._address = address
        self._port = port
        self._run_id = run_id

    @property
    def use_agent_store(self) -> bool:
        """Ranks use this process's store."""
        return True

    def get_backend(self) -> str:
        """What the agent's events call it: ranks are fixed, as with torch's static rendezvous."""
        return "static"

    def next_rendezvous(self) -> RendezvousInfo:
        """Called by the agent each time it starts the ranks."""
        store = TCPStore(
            self._address, self._port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
        )
        self._port = 0
        place = RendezvousStoreInfo(self._address, store.port)
        return RendezvousInfo(PrefixStore(self._run_id, store), 0, 1, place)

    def is_closed(self) -> bool:
        """Never: there is nobody to close it for."""
        return False

    def set_closed(self) -> None:
        """Nothing to close."""

    def num_nodes_waiting(self) -> int:
        """No other node comes."""
        return 0

    def get_run_id(self) -> str:
        """The run's name."""
        return self._run_id

    def shutdown(self) -> bool:
        """The store ends with this process."""
        return True
