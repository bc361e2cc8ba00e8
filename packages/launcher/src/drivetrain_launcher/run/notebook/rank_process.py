"""A rank as the notebook sees it: a fresh interpreter, its output and its channel."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress

from drivetrain_launcher.run.keeper.sessions import kill_sessions
from drivetrain_launcher.run.notebook.rank_channel import Message, RankChannel
from drivetrain_launcher.run.process_link import start_linked

# The first argument is the number of the channel's socket, the others are sys.path. Run as `-c`, so that `__main__`
# is empty, as in a notebook, and no file is imported again by processes that the rank spawns.
_PROGRAM = (
    "import sys; sys.path[:] = sys.argv[2:]; "
    "from drivetrain_launcher.run.notebook.rank_main import main; main(int(sys.argv[1]))"
)
_CHUNK_BYTES = 1 << 16


class RankProcess:
    """A process that waits for calls, and leads a session: Ctrl-C reaches it from the notebook only."""

    def __init__(self, rank: int, *, environment: Mapping[str, str], folder: str) -> None:
        self._process, connection = start_linked(
            lambda number: (sys.executable, "-c", _PROGRAM, str(number), *sys.path),
            environment=environment,
            folder=folder,
            stdin=subprocess.DEVNULL,
            outputs=subprocess.PIPE,
        )
        self.rank = rank
        self.pid = self._process.pid
        self.channel = RankChannel(connection)
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._streams = {"stdout": self._process.stdout, "stderr": self._process.stderr}
        for stream in self._streams.values():
            os.set_blocking(stream.fileno(), False)

    def files(self) -> Iterator[tuple[str, int]]:
        """Yield the name and number of each file of the rank to wait for: "stdout", "stderr" and "channel"."""
        yield from ((name, stream.fileno()) for name, stream in self._streams.items())
        yield "channel", self.channel.fileno()

    def read(self, name: str) -> bytes:
        """Return output that can be read without waiting; empty if there is none."""
        with suppress(BlockingIOError):
            return os.read(self._streams[name].fileno(), _CHUNK_BYTES)
        return b""

    def exit_code(self) -> int | None:
        """Return the rank's exit code, negative for the signal that ended the rank; None while it runs."""
        return self._process.poll()

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the rank, unless it has ended."""
        self._process.send_signal(number)

    def ask_to_end(self) -> None:
        """Ask the rank to end once it waits for a call."""
        with suppress(OSError):  # it has ended
            self.channel.send(Message.END)

    def kill(self) -> None:
        """Kill the rank with all processes that it has started, and wait for its end."""
        kill_sessions([self.pid])
        self._process.wait()

    def close(self) -> None:
        """Kill the remaining processes of the rank's session, and close its files."""
        self.kill()
        self.channel.close()
        for stream in self._streams.values():
            stream.close()
