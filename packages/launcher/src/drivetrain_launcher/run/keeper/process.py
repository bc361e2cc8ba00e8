"""The keeper process: shows what the ranks write, and ends them if their launcher dies without ending them.

Started by its path, as `python -IS process.py CONNECTION OPTIONS`: it imports the standard library and its own few
modules, and is ready within milliseconds. It leads a session, and survives a signal to the launcher's process group.
"""

import json
import os
import select
import selectors
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from threading import Condition, Thread
from typing import Any

# Isolated, Python has put nothing of ours on the path.
sys.path.insert(0, os.path.abspath(os.path.join(os.path.dirname(__file__), *[os.pardir] * 3)))

from drivetrain_launcher.run.keeper.keeper_messages import KeeperOptions, Stream
from drivetrain_launcher.run.keeper.rank_output import RankOutputs
from drivetrain_launcher.run.keeper.sessions import end_sessions, kill_sessions, leaders_with
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
# Beyond this, ranks wait for the output, as they do for any terminal or pipe.
_MAX_PENDING_BYTES = 8 << 20
_WRITE_BYTES = 1 << 18


class OutputThread:
    """A thread that writes to an output, so that a slow terminal or a full pipe stops nothing else."""

    def __init__(self, file: int) -> None:
        self._file = file
        self._waiting: deque[bytes] = deque()
        self._pending_bytes = 0
        self._is_broken = False
        self._changed = Condition()
        Thread(target=self._run, name=f"output {file}", daemon=True).start()

    @property
    def is_full(self) -> bool:
        """True if the output is so far behind that nothing more should be read for it."""
        return self._pending_bytes > _MAX_PENDING_BYTES

    @property
    def is_empty(self) -> bool:
        """True if all has been written, or nobody reads the output any more."""
        return self._pending_bytes == 0

    def write(self, data: bytes) -> None:
        """Add bytes, and return at once."""
        if self._is_broken or not data:
            return
        with self._changed:
            self._waiting.append(data)
            self._pending_bytes += len(data)
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting:
                    self._changed.wait()
                data = self._waiting.popleft()
            rest = memoryview(data)
            while rest and not self._is_broken:
                try:
                    rest = rest[os.write(self._file, rest[:_WRITE_BYTES]) :]
                except BlockingIOError:  # another program has made the terminal non-blocking
                    select.select([], [self._file], [], 1.0)
                except OSError:  # the reader has gone: the ranks go on without it
                    self._is_broken = True
            with self._changed:
                self._pending_bytes -= len(data)


class KeeperProcess:
    """The state of the keeper process. If the connection ends, the launcher has died."""

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
        """Work until the launcher announces its end; if the launcher has died, until its ranks are ended."""
        connection = self._channel.connection.fileno()
        while True:
            now = time.monotonic()
            self._watch(() if self._is_full else self._outputs.files)
            held = any(screen.has_held for screen in self._screens.values())
            seconds = _BACKPRESSURE_LOOK_SECONDS if self._is_full else _LOOK_SECONDS if held else 1.0
            ready = {key.fd for key, _ in self._selector.select(seconds)}
            self._fit()
            for file in ready - {connection}:
                self._outputs.read(file, now=now)
            self._release()
            if connection not in ready:
                continue
            messages = self._channel.receive()
            if messages is None:
                return self._end_ranks()
            for message in messages:
                if message["kind"] == "end":
                    return None
                self._do(message)

    @property
    def _is_full(self) -> bool:
        return any(writer.is_full for writer in self._writers.values())

    def _screen(self, file: int) -> Screen:
        def size() -> Size:
            columns, rows = 0, 0
            with suppress(OSError):  # the terminal has been closed
                columns, rows = os.get_terminal_size(file)
            return Size(columns or 80, rows or 24)

        is_terminal = self._options.terminals[file - 1]
        return Screen(self._writers[file].write, size if is_terminal else None)

    def _watch(self, files: Sequence[int]) -> None:
        """Have the selector wait for these outputs and for the launcher's connection."""
        before = set(self._selector.get_map()) - {self._channel.connection.fileno()}
        for file in before - {*files}:
            self._selector.unregister(file)
        for file in {*files} - before:
            self._selector.register(file, selectors.EVENT_READ)

    def _fit(self) -> None:
        """Pass a changed size of the terminal on to the pseudo-terminals."""
        terminal = next((file for file in (1, 2) if self._options.terminals[file - 1]), None)
        if terminal is None:
            return
        with suppress(OSError):
            columns, rows = os.get_terminal_size(terminal)
            if Size(columns, rows) != self._size:
                self._size = Size(columns, rows)
                self._outputs.resize(self._size)

    def _do(self, message: Mapping[str, Any]) -> None:
        match message["kind"]:
            case "attempt":
                self._watch(())
                self._outputs.close()
                self._ranks, self._token = [], message["token"]
            case "stream":
                self._outputs.add(Stream(**message["stream"]), self._channel.take_file())
                self._size = None
                self._fit()
            case "ranks":
                self._ranks, self._token = message["pids"], ""
            case "say":
                self._tell(message["text"])
            case "drain":
                self._drain()
                self._channel.send("drained")
            case _:  # "tail"
                lines = self._outputs.last_lines(message["rank"], message["count"])
                self._channel.send("lines", lines=lines)

    def _drain(self, *, patience_seconds: float = float("inf")) -> None:
        """Show all output of the ranks, after the ranks have ended."""
        self._read_all()
        self._outputs.end(now=time.monotonic())
        deadline = time.monotonic() + patience_seconds
        while not all(writer.is_empty for writer in self._writers.values()) and time.monotonic() < deadline:
            time.sleep(0.001)

    def _read_all(self) -> None:
        """Read the bytes that the pipes hold now, without waiting for more."""
        for _ in range(_READS_PER_PIPE):
            found = [self._outputs.read(file, now=time.monotonic()) for file in self._outputs.files]
            if not any(found):
                return

    def _release(self) -> None:
        for screen in self._screens.values():
            screen.release(now=time.monotonic())

    def _end_ranks(self) -> None:
        """End the ranks of a launcher that died, and show their output until the end."""

        def show() -> None:
            if not self._is_full:
                self._read_all()
            self._release()

        grace = self._options.grace_seconds
        self._tell(
            f"the launcher (process {self._options.launcher}) died; its ranks stop, and have {grace:g} s to save"
        )
        end_sessions(self._ranks, seconds=grace, meanwhile=show)
        # Ranks that were being started when the launcher died, and of which it could not tell.
        deadline = time.monotonic() + _APPEAR_SECONDS
        while self._token and time.monotonic() < deadline:
            kill_sessions(leaders_with(self._token))
            time.sleep(0.1)
        self._drain(patience_seconds=_LAST_WORDS_SECONDS)

    def _tell(self, text: str) -> None:
        self._screens[2].write_lines(f"drivetrain: {text}\n".encode(), now=time.monotonic())


def main(arguments: Sequence[str]) -> None:
    """Run the keeper process."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGTTOU):
        signal.signal(number, signal.SIG_IGN)  # they are for the launcher, whose end this process awaits
    options = KeeperOptions(**json.loads(arguments[1]))
    KeeperProcess(socket.socket(fileno=int(arguments[0])), options).run()


if __name__ == "__main__":
    main(sys.argv[1:])
