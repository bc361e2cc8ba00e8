"""Follow the output of a job through Ray's Jobs API; after a broken connection, go on at the same place."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

from drivetrain_clusters.errors import ClusterError

_POLL_SECONDS = 1.0


class JobOutput:
    """The output of a job, of which each character is written once; `client` is Ray's Jobs API client."""

    def __init__(self, client: Any, job_id: str, write: Callable[[str], None]) -> None:
        self._client = client
        self._job_id = job_id
        self._write = write
        self._num_written = 0

    def follow(self) -> int:
        """Write the output until the job ends, and return the exit code of its driver."""
        while not self._info().status.is_terminal():
            try:
                asyncio.run(self._tail())
            except (OSError, RuntimeError):
                # The connection broke; the next look at the job says whether it is there.
                time.sleep(_POLL_SECONDS)
        self._write_new(self._client.get_job_logs(self._job_id))
        info = self._info()
        if info.driver_exit_code is not None:
            return info.driver_exit_code
        # The driver was killed, or never started, as Ray's message says.
        if info.message:
            self._write(f"{info.message}\n")
        return 0 if str(info.status) == "SUCCEEDED" else 1

    def _info(self) -> Any:
        try:
            return self._client.get_job_info(self._job_id)
        except (OSError, RuntimeError) as error:
            raise ClusterError(
                f"job {self._job_id}: Ray does not know the job, or Ray cannot be reached: {error}"
            ) from error

    async def _tail(self) -> None:
        """Write the new part of the output; Ray sends all of it on each connection."""
        position = 0
        async for text in self._client.tail_job_logs(self._job_id):
            self._write_new(text, position)
            position += len(text)

    def _write_new(self, text: str, position: int = 0) -> None:
        """Write the new part of a text, given its position in the output."""
        new = text[max(self._num_written - position, 0) :]
        if new:
            self._write(new)
            self._num_written = position + len(text)
