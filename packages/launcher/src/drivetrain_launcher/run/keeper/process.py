"""The keeper process: shows what the ranks write, and ends them if their launcher dies without ending them.

Started by its path, as `python -IS process.py CONNECTION OPTIONS`: it imports the standard library and its own few
modules, and is ready within milliseconds. It leads a session of its own, so that what ends the launcher's process
group does not end it too.
"""

import json
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

# Isolated, Python has put nothing of ours on the path.
sys.path.insert(0, os.path.abspath(os.path.join(os.path.dirname(__file__), *[os.pardir] * 3)))

from drivetrain_launcher.run.keeper.keeper_messages import KeeperOptions, Stream
from drivetrain_launcher.run.keeper.output_thread import OutputThread
from drivetrain_launcher.run.keeper.rank_output import RankOutputs
from drivetrain_launcher.run.keeper.sessions import kill_sessions, leaders_with
from drivetrain_launcher.run.output.screen import Screen, Size
from drivetrain_launcher.run.process_link import ProcessLink

_LOOK_SECONDS = 0.25
_BACKPRESSURE_LOOK_SECONDS = 0.005
# How long ranks that were being started when the launcher died may take to appear.
_APPEAR_SECONDS = 2.0
# How long an output that nobody reads may hold the keeper up after the launcher's death.
_LAST_WORDS_SECONDS = 5.0
# A full pipe of 1 MiB is read in fewer pieces than this.
_READS_PER_PIPE = 16


class KeeperProcess:
    """The state of the keeper process.

    Args:
        connection: The connection to the launcher; its end tells of the launcher's death.
        options: The facts that the launcher gave at the start.
    """

    def __init__(self, connection: socket.socket, options: KeeperOptions) -> None:
        self._options = options
        self._channel = ProcessLink(connection)
        self._writers = {1: OutputThread(1)}
        self._writers[2] = self._writers[1] if options.are_same else OutputThread(2)
        first = self._screen(1)
        self._screens = {1: first, 2: first if options.are_same else self._screen(2)}
        self._outputs = RankOutputs(self._screens, tell=self._tell)
        self._ranks: list[int] = []
        self._token = ""
        self._size: Size | None = None
        self._selector = selectors.DefaultSelector()
        self._selector.register(connection, selectors.EVENT_READ)

    def run(self) -> None:
        """Work until the launcher says that it ends, or has died and its ranks are ended."""
        while True:
            now = time.monotonic()
            is_full = any(writer.is_full for writer in self._writers.values())
            self._watch(() if is_full else self._outputs.files)
            held = any(screen.has_held for screen in self._screens.values())
            seconds = _BACKPRESSURE_LOOK_SECONDS if is_full else _LOOK_SECONDS if held else 1.0
            ready = {key.fd for key, _ in self._selector.select(seconds)}
            self._fit()
            connection = self._channel.connection.fileno()
            for file in ready - {connection}:
                self._outputs.read(file, now=now)
            for screen in self._screens.values():
                screen.release(now=time.monotonic())
            if connection in ready and not self._obey():
                return

    def _screen(self, file: int) -> Screen:
        def size() -> Size:
            columns, rows = 0, 0
            with suppress(OSError):  # the terminal has been closed
                columns, rows = os.get_terminal_size(file)
            return Size(columns or 80, rows or 24)

        is_terminal = self._options.terminals[file - 1]
        return Screen(self._writers[file].write, size if is_terminal else None)

    def _watch(self, files: Sequence[int]) -> None:
        """Have the selector look at these outputs, and at the launcher."""
        before = set(self._selector.get_map()) - {self._channel.connection.fileno()}
        for file in before - {*files}:
            self._selector.unregister(file)
        for file in {*files} - before:
            self._selector.register(file, selectors.EVENT_READ)

    def _fit(self) -> None:
        """Hand a new size of the terminal on."""
        terminal = next((file for file in (1, 2) if self._options.terminals[file - 1]), None)
        if terminal is None:
            return
        with suppress(OSError):
            columns, rows = os.get_terminal_size(terminal)
            if Size(columns, rows) != self._size:
                self._size = Size(columns, rows)
                self._outputs.resize(self._size)

    def _obey(self) -> bool:
        """Do what the launcher says; return whether to go on."""
        messages = self._channel.receive()
        if messages is None:
            self._launcher_died()
            return False
        for message in messages:
            if message["kind"] == "end":
                return False
            self._do(message)
        return True

    def _do(self, message: dict) -> None:  # pyright: ignore[reportMissingTypeArgument, reportUnknownParameterType]
        kind = message["kind"]
        if kind == "attempt":
            self._watch(())
            self._outputs.close()
            self._ranks, self._token = [], message["token"]
        elif kind == "stream":
            self._outputs.add(Stream(**message["stream"]), self._channel.take_file())
            self._size = None
            self._fit()
        elif kind == "ranks":
            self._ranks, self._token = message["pids"], ""
        elif kind == "say":
            self._screens[2].write_lines(message["text"].encode(), now=time.monotonic())
        elif kind == "drain":
            self._drain()
            self._channel.send("drained")
        elif kind == "tail":
            self._channel.send("lines", lines=self._outputs.last_lines(message["rank"], message["count"]))

    def _drain(self, *, patience_seconds: float = float("inf")) -> None:
        """Show all that the ranks, which have ended, have written."""
        self._read_all()
        self._outputs.end(now=time.monotonic())
        deadline = time.monotonic() + patience_seconds
        while not all(writer.is_empty for writer in self._writers.values()) and time.monotonic() < deadline:
            time.sleep(0.001)

    def _read_all(self) -> None:
        """Read what the pipes hold by now; what somebody goes on to write is not waited for."""
        for _ in range(_READS_PER_PIPE):
            found = [self._outputs.read(file, now=time.monotonic()) for file in self._outputs.files]
            if not any(found):
                return

    def _launcher_died(self) -> None:
        """Ask the ranks to stop, give them time to save while their output is shown, then kill what is left."""
        grace = self._options.grace_seconds
        self._tell(
            f"the launcher (process {self._options.launcher}) died; its ranks stop, and have {grace:g} s to save"
        )
        ranks = _Ends(self._ranks)
        ranks.send(signal.SIGTERM)
        ranks.send(signal.SIGCONT)  # a stopped one does not see it otherwise
        deadline = time.monotonic() + grace
        while ranks.are_running and time.monotonic() < deadline:
            if not any(writer.is_full for writer in self._writers.values()):
                self._read_all()
            self._outputs_idle(0.02)
        kill_sessions(self._ranks)
        self._kill_appearing()
        self._drain(patience_seconds=_LAST_WORDS_SECONDS)

    def _outputs_idle(self, seconds: float) -> None:
        now = time.monotonic()
        for screen in self._screens.values():
            screen.release(now=now)
        time.sleep(seconds)

    def _kill_appearing(self) -> None:
        """Kill ranks that were being started when the launcher died, and of which it could not tell."""
        deadline = time.monotonic() + _APPEAR_SECONDS
        while self._token and time.monotonic() < deadline:
            kill_sessions(leaders_with(self._token))
            time.sleep(0.1)

    def _tell(self, text: str) -> None:
        self._screens[2].write_lines(f"drivetrain: {text}\n".encode(), now=time.monotonic())


class _Ends:
    """Processes by handles that stay theirs, even when their ids are given to others."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = list(pids)
        self._handles: list[int] = []
        for pid in pids if hasattr(os, "pidfd_open") else ():
            with suppress(OSError):  # it has ended
                self._handles.append(os.pidfd_open(pid))

    @property
    def are_running(self) -> bool:
        """True if one has not ended."""
        if not hasattr(os, "pidfd_open"):
            return any(_exists(pid) for pid in self._pids)
        poll = selectors.PollSelector()
        for handle in self._handles:
            poll.register(handle, selectors.EVENT_READ)
        return len(poll.select(0)) < len(self._handles)

    def send(self, number: signal.Signals) -> None:
        """Send all of them a signal."""
        for pid in self._pids:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def main(arguments: Sequence[str]) -> None:
    """Run the keeper process."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGTTOU):
        signal.signal(number, signal.SIG_IGN)  # they are for the launcher, whose end this process awaits
    said = json.loads(arguments[1])
    options = KeeperOptions(
        launcher=said["launcher"],
        grace_seconds=said["grace_seconds"],
        are_same=said["are_same"],
        terminals=(said["terminals"][0], said["terminals"][1]),
    )
    KeeperProcess(socket.socket(fileno=int(arguments[0])), options).run()


if __name__ == "__main__":
    main(sys.argv[1:])
