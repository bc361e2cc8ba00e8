"""The launcher's side of the process that ranks are forked off."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from select import select
from typing import IO, Any

from drivetrain_config import environ
from drivetrain_launcher.errors import LaunchError
from drivetrain_launcher.plan.launch_plan import LaunchPlan
from drivetrain_launcher.run.keeper.sessions import kill_sessions
from drivetrain_launcher.run.process_link import ProcessLink, start_linked
from drivetrain_messages import say

# OpenMP reads them, and the cores of its process, when torch is imported.
_READ_AT_IMPORT = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")


class ForkedRank:
    """A rank that another process has forked, with the methods of `Popen` that torch's agent calls.

    `look` waits some seconds (None: without a limit) until ranks end, and sets the `returncode` of ended ranks.
    """

    def __init__(self, pid: int, look: Callable[[float | None], None]) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._look = look

    def poll(self) -> int | None:
        """Return the rank's exit code; None while the rank runs."""
        if self.returncode is None:
            self._look(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait some seconds for the rank to end, and return its exit code; raise TimeoutExpired if it runs on."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.returncode is None:
            rest = None if deadline is None else deadline - time.monotonic()
            if timeout is not None and rest is not None and rest <= 0:
                raise subprocess.TimeoutExpired("rank", timeout)
            self._look(rest)
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        """Send the rank a signal, unless it is known to have ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


class Preloader(AbstractContextManager["Preloader"]):
    """The process that the ranks of a plan are forked off, which ends with this context manager."""

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
        self._is_ready = False
        self._process, self._link = self._start()

    def __exit__(self, *_: object) -> None:
        """End the process; its ranks have ended."""
        self._process.kill()
        self._link.connection.close()
        self._process.wait()

    def start_rank(
        self, environment: Mapping[str, str], *, cpus: Sequence[int], outputs: Sequence[IO[Any] | None]
    ) -> ForkedRank:
        """Fork a rank with all its environment variables, its CPUs (empty for any), stdout and stderr (or None).

        A LaunchError names a module that cannot be imported, or after which ranks cannot be forked.
        """
        if self._is_ready and self._process.poll() is not None:
            say("the process that ranks are forked off was killed; another one imports the modules")
            self._link.connection.close()
            self._is_ready = False
            self._process, self._link = self._start()
        if not self._is_ready:
            while not (messages := self._link.receive()) and messages is not None:
                pass  # a part of a long message
            refusal = messages[0]["refusal"] if messages else "the process that imports was killed"
            if refusal:
                raise LaunchError(f"{self._flag}: {refusal}; leave it out, and each rank imports by itself")
            self._is_ready = True
        try:
            self._link.send(
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
                "the preload process was killed while starting a rank; see dmesg for the OOM killer, or launch "
                f"without {self._flag}"
            ) from error
        return started

    def look(self, seconds: float | None = 0.0) -> None:
        """Wait some seconds (None: without a limit) to learn which ranks have ended."""
        if self._ranks and select([self._link.connection], [], [], seconds)[0]:
            try:
                self._take_messages()
            except OSError:
                self._end_orphans()

    def _take_messages(self) -> ForkedRank | None:
        """Wait for messages; return a rank that was started. An OSError says that the process was killed."""
        messages = self._link.receive()
        if messages is None:
            raise ConnectionResetError
        started = None
        for message in messages:
            pid = message["pid"]
            if pid not in self._ranks:  # one that was killed before it could tell of its start has ended, too
                started = self._ranks[pid] = ForkedRank(pid, self.look)
            if message["kind"] == "ended":
                self._ranks.pop(pid).returncode = message["exit_code"]
                self._link.send("known", pid=pid)
        return started

    def _end_orphans(self) -> None:
        """Kill the ranks after the process that reports their ends was killed."""
        self._process.kill()
        self._process.wait()
        kill_sessions(self._ranks)
        for rank in self._ranks.values():
            rank.returncode = -signal.SIGKILL
        self._ranks.clear()

    def _start(self) -> tuple[subprocess.Popen[bytes], ProcessLink]:
        program, worker, *rest = self._plan.command
        modules = ",".join(self._plan.preload)
        process, connection = start_linked(
            lambda number: (program, worker, f"--preload={number}:{modules}", *rest)
        )
        return process, ProcessLink(connection)
