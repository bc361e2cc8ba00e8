"""The private names of torch's elastic agent that this package uses, in one place.

torch has no public API for them. They are the same in torch 2.9 to 2.15 unless a comment says otherwise;
tests/launcher/test_compat.py checks each name's behaviour, and docs/design/platforms.md lists the names.

This module is imported only to start processes under the agent, since it imports what torchrun imports of torch.
"""

import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from inspect import signature
from signal import Signals
from subprocess import Popen
from typing import IO, Any, TypeAlias, cast

from torch.distributed import TCPStore
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import api
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

# The methods of torch's agent that `run.elastic.Agent` overrides: the agent calls the first each time it starts the
# ranks, the second at every interval, the third to stop them, and the fourth to agree on ranks with other nodes.
OVERRIDDEN = ("_start_workers", "_monitor_workers", "_shutdown", "_rendezvous")
# Whether `_shutdown` takes a timeout: torch up to 2.11 waits 30 s.
HAS_SHUTDOWN_TIMEOUT = (
    "timeout" in signature(LocalElasticAgent._shutdown).parameters  # pyright: ignore[reportPrivateUsage]
)


# A function that starts a rank instead of torch: it gets the local rank, all environment variables of the rank, the
# files for stdout and stderr (None for the launcher's own), and the function that starts the rank as torch does. It
# returns the process, with `pid`, `returncode`, `poll` and `wait` as in `Popen`.
StartRank: TypeAlias = (
    "Callable[[int, Mapping[str, str], Sequence[IO[Any] | None], Callable[[], Popen[Any]]], object]"
)


@contextmanager
def ranks_started_by(start: StartRank) -> Generator[None]:
    """Have torch's agent start ranks by `start` within the block, as the agent has no setting for that."""
    torchs = api.get_subprocess_handler

    def handler(*, local_rank_id: int, **kwargs: Any) -> SubprocessHandler:
        class Handler(SubprocessHandler):
            def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> "Popen[Any]":
                popen = super()._popen
                outputs = (cast("IO[Any] | None", self._stdout), cast("IO[Any] | None", self._stderr))
                fresh = partial(popen, args, env)
                return cast("Popen[Any]", start(local_rank_id, env, outputs, fresh))

            def close(self, death_sig: Signals | None = None) -> None:
                # torch calls it for a rank that ran a moment ago; whoever forked it may have been killed since, and
                # the rank with it.
                with suppress(ProcessLookupError):
                    super().close(death_sig)

        return Handler(local_rank_id=local_rank_id, **kwargs)

    api.get_subprocess_handler = handler
    try:
        yield
    finally:
        api.get_subprocess_handler = torchs


def host_ranks_store_by(handler: DynamicRendezvousHandler, host: Callable[[str], TCPStore]) -> None:
    """Have torch's handler create the ranks' store by `host(address)`: torch's own store listens everywhere."""

    def create(master_addr: str, master_port: int) -> TCPStore:
        del master_port  # 0, for any free one
        return host(master_addr)

    handler._create_tcp_store_server = create  # pyright: ignore[reportPrivateUsage]


def exit_codes(agent: LocalElasticAgent) -> list[int | None]:
    """Return the exit codes of the ranks that the agent started last; None for a rank that still runs."""
    context = agent._pcontext  # pyright: ignore[reportPrivateUsage]
    handlers: Mapping[int, SubprocessHandler] = getattr(context, "subprocess_handlers", {})
    return [handler.proc.returncode for handler in handlers.values()]


def poll_exit_codes(agent: LocalElasticAgent) -> dict[int, int]:
    """Poll the ranks that the agent started last; return the exit codes of the ended ranks, by local rank."""
    context = agent._pcontext  # pyright: ignore[reportPrivateUsage]
    handlers: Mapping[int, SubprocessHandler] = getattr(context, "subprocess_handlers", {})
    codes = {local_rank: handler.proc.poll() for local_rank, handler in handlers.items()}
    return {local_rank: code for local_rank, code in codes.items() if code is not None}


def remaining_restarts(agent: LocalElasticAgent) -> int:
    """Return how many times the agent will still restart the ranks after a failure."""
    return agent._remaining_restarts  # pyright: ignore[reportPrivateUsage]


def forgo_restarts(agent: LocalElasticAgent) -> None:
    """Keep the agent from restarting the ranks again."""
    agent._remaining_restarts = 0  # pyright: ignore[reportPrivateUsage]


# These loggers report failed and stopped ranks, which the launcher reports itself, once and shorter.
_TALKERS = (
    "torch.distributed.elastic.agent.server.api",
    "torch.distributed.elastic.multiprocessing.api",
    "torch.multiprocessing.spawn",
)


@contextmanager
def silence_torch() -> Generator[None]:
    """Run the block without torch's log messages about ranks."""
    loggers = [logging.getLogger(name) for name in _TALKERS]
    before = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
