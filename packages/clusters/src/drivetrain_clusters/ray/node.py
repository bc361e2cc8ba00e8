"""A node of a job on Ray: an actor that runs the node's launcher and yields its output."""

import asyncio
import ctypes
import signal
import sys
from codecs import getincrementaldecoder
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any

from drivetrain_clusters.ray.job import JOB_VARIABLE
from drivetrain_clusters.system_command import in_this_python
from drivetrain_config import environ

_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux' prctl
_CHUNK_BYTES = 65536


class Node:
    """A node of a job. Ray runs its methods concurrently in one thread."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._is_stopped = False

    async def describe(self) -> tuple[str, int, tuple[str, ...]]:
        """Return the address of the node, a port that is free on it, and the accelerators bound to it."""
        import socket

        import ray
        from ray.util import get_node_ip_address

        address = get_node_ip_address()
        bound = ray.get_runtime_context().get_accelerator_ids()
        devices = next((ids for ids in bound.values() if ids), [])
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
            probe.bind((address, 0))
            port = probe.getsockname()[1]
        return address, port, tuple(map(str, devices))

    async def run(
        self, command: tuple[str, ...], folder: str | None, variables: dict[str, str]
    ) -> AsyncGenerator[str | int]:
        """Run the launcher, and yield its output as it appears and at last its exit code."""
        if self._is_stopped:
            yield 128 + signal.SIGTERM
            return
        changes: dict[str, Any] = {JOB_VARIABLE: None, **variables}
        try:
            # Started in this actor's one thread, which ends with the actor alone: the launcher notices its end.
            self._process = await asyncio.create_subprocess_exec(
                *in_this_python(command),
                cwd=folder,
                env=environ.child_environment(**changes),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_end_with_parent if sys.platform == "linux" else None,
            )
        except OSError as error:
            yield f"drivetrain: error: cannot start {command[0]} in {folder}: {error.strerror}\n"
            yield 2
            return
        assert self._process.stdout is not None
        decoder = getincrementaldecoder("utf-8")("replace")
        while chunk := await self._process.stdout.read(_CHUNK_BYTES):
            if text := decoder.decode(chunk):
                yield text
        code = await self._process.wait()
        yield code if code >= 0 else 128 - code

    async def stop(self) -> None:
        """Tell the launcher to save and end."""
        self._is_stopped = True
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.terminate()


def _end_with_parent() -> None:
    """Have Linux send SIGTERM to this process once the thread that started it has ended."""
    ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGTERM)
