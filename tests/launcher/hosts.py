"""Hosts for tests: network namespaces on a bridge, each with a name, an address and processes of its own.

A host can be frozen, thawed, killed, cut off from the network or slowed; the tests need root and iproute2.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

_PREFIX = f"dt{os.getpid() % 10_000}"
_BRIDGE = f"{_PREFIX}br"
_NAMES = ("a", "b", "c")
_HERE = Path(__file__).parent


def _run(*command: str, check: bool = True) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=check).stdout


def can_make_hosts() -> bool:
    """Whether this process may make network namespaces."""
    if os.name == "nt" or os.geteuid() != 0 or not all(map(shutil.which, ("ip", "unshare"))):
        return False
    name = f"{_PREFIX}try"
    try:
        _run("ip", "netns", "add", name)
    except subprocess.SubprocessError:
        return False
    _run("ip", "netns", "del", name, check=False)
    return True


class Launcher:
    """A launcher on a host, with its output in a file."""

    def __init__(self, process: "subprocess.Popen[bytes]", log: Path) -> None:
        self.process = process
        self.log = log

    @property
    def output(self) -> str:
        """What the launcher and its ranks have written so far."""
        return self.log.read_text()

    def wait_for(self, words: str, *, count: int = 1, seconds: float = 240) -> float:
        """Wait until the output contains words, some times, and return the seconds that took."""
        began = time.monotonic()
        while self.output.count(words) < count:
            assert time.monotonic() - began < seconds, f"no {words!r} in {self.output}"
            time.sleep(0.05)
        return time.monotonic() - began

    def end(self, seconds: float = 240) -> int:
        """Wait for the end and return the exit code."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still runs: {self.output}") from None


class Host:
    """A network namespace with a host name of its own.

    Attributes:
        name: The name of the host.
        address: Its address on the bridge.
    """

    def __init__(self, name: str, number: int, folder: Path) -> None:
        self.name = name
        self.address = f"10.213.7.{number}"
        self._space = f"{_PREFIX}{name}"
        self._link = f"{_PREFIX}{name}v"
        self._folder = folder
        self._launchers: list[Launcher] = []
        self._relay: subprocess.Popen[bytes] | None = None

    def make(self, hosts_file: str) -> None:
        """Make the namespace and its link to the bridge."""
        here = Path("/etc/netns") / self._space
        here.mkdir(parents=True, exist_ok=True)
        (here / "hosts").write_text(hosts_file)
        _run("ip", "netns", "add", self._space)
        _run("ip", "link", "add", self._link, "type", "veth", "peer", "name", "eth0", "netns", self._space)
        _run("ip", "link", "set", self._link, "master", _BRIDGE, "up")
        inside = ("ip", "-n", self._space)
        _run(*inside, "link", "set", "lo", "up")
        _run(*inside, "addr", "add", f"{self.address}/24", "dev", "eth0")
        _run(*inside, "link", "set", "eth0", "up")
        _run("ip", "netns", "exec", self._space, sys.executable, str(_HERE / "checksums.py"), "eth0")

    def start(self, *command: str, environment: dict[str, str]) -> Launcher:
        """Start `drivetrain ARGUMENTS...` on this host."""
        log = self._folder / f"{self.name}{len(self._launchers)}.log"
        inside = ("ip", "netns", "exec", self._space, "unshare", "--uts", "sh", "-c")
        act = f'hostname {self.name}; exec "$@"'
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*inside, act, "sh", sys.executable, "-m", "drivetrain_launcher", *command],
                cwd=self._folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._launchers.append(Launcher(process, log))
        return self._launchers[-1]

    def pids(self) -> list[int]:
        """Return the ids of the processes on this host."""
        return [int(pid) for pid in _run("ip", "netns", "pids", self._space, check=False).split()]

    def send(self, number: signal.Signals) -> None:
        """Send a signal to all processes of this host."""
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill(self) -> None:
        """Kill all processes."""
        self.send(signal.SIGKILL)

    def freeze(self) -> None:
        """Stop all processes where they are."""
        self.send(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let all processes go on."""
        self.send(signal.SIGCONT)

    def cut(self) -> None:
        """Take the link to the other hosts down: nothing passes, and no connection is closed."""
        _run("ip", "link", "set", self._link, "down")

    def repair(self) -> None:
        """Bring the link up again."""
        _run("ip", "link", "set", self._link, "up")

    def slow(self, *, delay_seconds: float, loss: float) -> None:
        """Delay what passes the link, in both directions, and lose a part of it; a relay stands in for `tc netem`."""
        near, far = f"{_PREFIX}{self.name}x", f"{_PREFIX}{self.name}y"
        _run("ip", "link", "set", self._link, "nomaster")
        _run("ip", "link", "add", near, "type", "veth", "peer", "name", far)
        _run("ip", "link", "set", near, "up")
        _run("ip", "link", "set", far, "master", _BRIDGE, "up")
        self._relay = subprocess.Popen(
            [
                sys.executable,
                str(_HERE / "slow_link.py"),
                self._link,
                near,
                str(delay_seconds),
                str(loss),
                "3",
            ],
            stdout=subprocess.PIPE,
        )
        assert self._relay.stdout is not None
        assert self._relay.stdout.readline() == b"ready\n"

    def remove(self) -> None:
        """Kill what runs and remove the namespace."""
        self.kill()
        if self._relay is not None:
            self._relay.kill()
            self._relay.wait()
            assert self._relay.stdout is not None
            self._relay.stdout.close()
            _run("ip", "link", "del", f"{_PREFIX}{self.name}x", check=False)
        for launcher in self._launchers:
            launcher.process.wait(60)
        _run("ip", "netns", "del", self._space, check=False)
        _run("ip", "link", "del", self._link, check=False)
        shutil.rmtree(Path("/etc/netns") / self._space, ignore_errors=True)


@pytest.fixture(name="hosts")
def hosts_fixture(tmp_path: Path) -> Iterator[Callable[[int], list[Host]]]:
    """Make hosts a, b and c on one network; all see the folder `tmp_path`."""
    if not can_make_hosts():
        pytest.skip("needs root and iproute2, to make network namespaces")
    made: list[Host] = []

    def make(count: int) -> list[Host]:
        _run("ip", "link", "add", _BRIDGE, "type", "bridge")
        _run("ip", "link", "set", _BRIDGE, "up")
        made.extend(Host(name, number, tmp_path) for number, name in enumerate(_NAMES[:count], 1))
        lines = "".join(f"{host.address} {host.name}\n" for host in made)
        for host in made:
            host.make(f"127.0.0.1 localhost\n{lines}")
        return made

    yield make
    for host in made:
        host.remove()
    _run("ip", "link", "del", _BRIDGE, check=False)
