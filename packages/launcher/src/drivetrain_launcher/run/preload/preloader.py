"""The launcher's side of the process that ranks are forked off."""

import os
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from select import select
from typing import IO, Any

from drivetrain_config import environ
from drivetrain_launcher.errors import LaunchError
from drivetrain_launcher.plan.launch_plan import LaunchPlan
from drivetrain_launcher.run.keeper.sessions import kill_sessions
from drivetrain_launcher.run.preload.forked_rank import ForkedRank
from drivetrain_launcher.run.preload.preload_flag import PRELOAD_FLAG
from drivetrain_launcher.run.process_link import ProcessLink
from drivetrain_messages import say

# OpenMP reads them, and the cores of its process, when torch is imported.
_READ_AT_IMPORT = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")


@dataclass(slots=True)
class _Preloaded:
    """A running process."""

    process: subprocess.Popen[bytes]
    link: ProcessLink
    is_ready: bool = False


class Preloader:
    """The process that the ranks of a plan are forked off.

    Use it as a context manager; the process imports while the block goes on, and ends with it.

    Args:
        plan: The plan of the launch; its `preload` names the modules.

    Raises:
        LaunchError: This system cannot fork ranks safely, or a variable would bind their threads before they have
            their cores.
    """

    def __init__(self, plan: LaunchPlan) -> None:
        self._flag = f"--preload {','.join(plan.preload)}"
        if not hasattr(os, "pidfd_open"):
            raise LaunchError(f"{self._flag}: ranks are forked on Linux only; leave it out")
        found = [name for name in _READ_AT_IMPORT if environ.read(name) is not None]
        if plan.bindings and found:
            raise LaunchError(
                f"{self._flag} with --bind auto: {found[0]} is set, and would bind the threads "
                "of all ranks before they have their cores; unset it, or leave one of the two out"
            )
        self._plan = plan
        self._ranks: dict[int, ForkedRank] = {}
        self._running = self._start()

    def __enter__(self) -> "Preloader":
        """Return this object."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the process; its ranks have ended."""
        self._running.process.kill()
        self._running.link.connection.close()
        self._running.process.wait()

    def start_rank(
        self,
        environment: Mapping[str, str],
        *,
        cpus: Sequence[int],
        outputs: Sequence[IO[Any] | None],
    ) -> ForkedRank:
        """Fork a rank.

        Args:
            environment: The environment variables of the rank, all of them.
            cpus: The CPUs to bind it to; empty for any.
            outputs: The files for stdout and stderr; None for those of the launcher.

        Raises:
            LaunchError: A module cannot be imported, or ranks cannot be forked once it is.
        """
        if self._running.is_ready and self._running.process.poll() is not None:
            say("the process that ranks are forked off was killed; another one imports the modules")
            self._running.link.connection.close()
            self._running = self._start()
        self._await_ready()
        try:
            self._running.link.send(
                "rank",
                [file.fileno() for file in outputs if file is not None],
                environment=dict(environment),
                cpus=list(cpus),
                outputs=[file is not None for file in outputs],
            )
            while (started := self._take_messages()) is None:
                pass
        except OSError as error:
            self._end_orphans()
            raise LaunchError(
                "the process that ranks are forked off was killed while it started one"
            ) from error
        return started

    def look(self, seconds: float | None = 0.0) -> None:
        """Learn which ranks have ended.

        Args:
            seconds: The time to wait for one that ends; None for as long as it takes.
        """
        if self._ranks and select([self._running.link.connection], [], [], seconds)[0]:
            try:
                self._take_messages()
            except OSError:
                self._end_orphans()

    def _take_messages(self) -> ForkedRank | None:
        """Wait for messages; return a rank that was started.

        Raises:
            OSError: The process has been killed.
        """
        messages = self._running.link.receive()
        if messages is None:
            raise ConnectionResetError
        started = None
        for message in messages:
            pid = message["pid"]
            if pid not in self._ranks:  # one that was killed before it could tell of its start has ended, too
                started = self._ranks[pid] = ForkedRank(pid, self.look)
            if message["kind"] == "ended":
                self._ranks.pop(pid).returncode = message["exit_code"]
                self._running.link.send("known", pid=pid)
        return started

    def _end_orphans(self) -> None:
        """Kill the ranks, as the process that would tell of their ends has been killed."""
        self._running.process.kill()
        self._running.process.wait()
        kill_sessions(self._ranks)
        for rank in self._ranks.values():
            rank.returncode = -signal.SIGKILL
        self._ranks.clear()

    def _await_ready(self) -> None:
        if self._running.is_ready:
            return
        while not (messages := self._running.link.receive()) and messages is not None:
            pass  # a part of a long message
        refusal = messages[0]["refusal"] if messages else "the process that imports was killed"
        if refusal:
            raise LaunchError(f"{self._flag}: {refusal}; leave it out, and each rank imports by itself")
        self._running.is_ready = True

    def _start(self) -> _Preloaded:
        ours, theirs = socket.socketpair(socket.AF_UNIX)
        program, worker, *rest = self._plan.command
        with theirs:
            process = subprocess.Popen(
                [program, worker, f"{PRELOAD_FLAG}{theirs.fileno()}:{','.join(self._plan.preload)}", *rest],
                env=environ.child_environment(**self._plan.environment),
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        return _Preloaded(process, ProcessLink(ours))
