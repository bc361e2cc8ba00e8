"""Start a Ray cluster of two nodes on the loopback for tests, and stop it."""

import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from drivetrain_config import environ

HERE = Path(__file__).parent


class LocalRay:
    """A cluster that a test has started."""

    def __init__(self, process: subprocess.Popen[str], address: str) -> None:
        self.process = process
        self.options = {"address": address, "python": sys.executable}

    @property
    def flags(self) -> tuple[str, ...]:
        """The flags of `submit` that name this cluster."""
        return tuple(word for name, text in self.options.items() for word in ("--option", f"{name}={text}"))

    def replace_node(self) -> None:
        """Lose the second node, and add another one."""
        assert self.process.stdin is not None
        self.process.stdin.write("replace\n")
        self.process.stdin.flush()


@contextmanager
def ray_cluster() -> Iterator[LocalRay]:
    """Start a cluster, and stop it at the end."""
    folder = tempfile.mkdtemp(prefix="ray")  # the paths of Ray's sockets may not be long
    # Ray gives its own processes 30 s to start, which a busy machine may not keep.
    running = next((found for _ in range(3) if (found := _start_ray(folder)) is not None), None)
    assert running is not None, "Ray did not start"
    try:
        yield running
    finally:
        _stop_ray(running.process)
        shutil.rmtree(folder, ignore_errors=True)


def _start_ray(folder: str) -> LocalRay | None:
    """Start a cluster; None if Ray gave up."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, str(HERE / "local_ray.py"), str(port), folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        # Below `uv run`, Ray would start its workers by `uv run` too, in a folder without a project.
        # Ray takes the loopback for no address of a Linux node, and listens on all others, unless it is told this.
        env=environ.child_environment(
            RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",
            RAY_USAGE_STATS_ENABLED="0",
            RAY_ENABLE_UV_RUN_RUNTIME_ENV="0",
        ),
    )
    assert process.stdout is not None
    if any(line == "ready\n" for line in process.stdout):
        return LocalRay(process, f"http://127.0.0.1:{port}")
    _stop_ray(process)
    return None


def _stop_ray(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    process.wait(timeout=120)
    process.stdout.close()
