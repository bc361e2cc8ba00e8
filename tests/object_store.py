"""An S3 server for tests: moto's, on the loopback. It keeps objects in memory, and checks keys if told to."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.request import urlopen

from processes import free_port


@contextmanager
def s3_server(**environment: str) -> Iterator[Mapping[str, Any]]:
    """An S3 server on the loopback, in a process of its own; gives the options to reach it."""
    endpoint = f"http://127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", endpoint.rpartition(":")[2]]
    server = subprocess.Popen(
        command,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _await_answer(server, f"{endpoint}/moto-api/")
        yield {"endpoint_url": endpoint, "key": "test", "secret": "whispered"}
    finally:
        server.kill()
        server.wait()


def _await_answer(server: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        assert server.poll() is None, f"the S3 server ended with {server.returncode}"
        try:
            with urlopen(url, timeout=5):
                return
        except OSError:  # not there yet, or slow to answer
            time.sleep(0.05)
    raise AssertionError(f"no S3 server answers at {url}")
