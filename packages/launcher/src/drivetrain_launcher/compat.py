"""The private names of torch's elastic agent that this package uses, in one place.

torch has no public API for them. They are the same in torch 2.9 to 2.15 unless a comment says otherwise;
tests/launcher/test_compat.py holds each one to what is relied on, and docs/platforms.md lists them.

Imported only when processes are started under the agent, since it imports the parts of torch that torchrun does.
"""

from collections.abc import Mapping
from inspect import signature

from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

# The methods of torch's agent that `run.elastic.Agent` overrides: the agent calls the first each time it starts the
# ranks, the second at every interval, the third to stop them, and the fourth to agree on ranks with other nodes.
OVERRIDDEN = ("_start_workers", "_monitor_workers", "_shutdown", "_rendezvous")
# Whether `_shutdown` takes a timeout: torch 2.9 waits 30 s.
HAS_SHUTDOWN_TIMEOUT = (
    "timeout" in signature(LocalElasticAgent._shutdown).parameters  # pyright: ignore[reportPrivateUsage]
)


def exit_codes(agent: LocalElasticAgent) -> list[int | None]:
    """Return the exit codes of the ranks that the agent started last; None for one that runs."""
    context = agent._pcontext  # pyright: ignore[reportPrivateUsage]
    handlers: Mapping[int, SubprocessHandler] = getattr(context, "subprocess_handlers", {})
    return [handler.proc.returncode for handler in handlers.values()]


def poll_exit_codes(agent: LocalElasticAgent) -> dict[int, int]:
    """Look at the ranks that the agent started last, and return the exit codes of those that ended, by local rank."""
    context = agent._pcontext  # pyright: ignore[reportPrivateUsage]
    handlers: Mapping[int, SubprocessHandler] = getattr(context, "subprocess_handlers", {})
    codes = {local_rank: handler.proc.poll() for local_rank, handler in handlers.items()}
    return {local_rank: code for local_rank, code in codes.items() if code is not None}


def remaining_restarts(agent: LocalElasticAgent) -> int:
    """Return how many times the agent will still restart the ranks after a failure."""
    return agent._remaining_restarts  # pyright: ignore[reportPrivateUsage]


def forgo_restarts(agent: LocalElasticAgent) -> None:
    """Have the agent restart the ranks no more."""
    agent._remaining_restarts = 0  # pyright: ignore[reportPrivateUsage]
