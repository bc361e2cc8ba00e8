"""The launcher's side of the keeper process: start the keeper, report ranks and outputs to it, and replace it."""

import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from drivetrain_launcher.run.keeper.keeper_messages import KeeperOptions, Stream
from drivetrain_launcher.run.process_link import ProcessLink, start_linked

# Run by its path and isolated, so that it starts in some milliseconds.
_PROCESS = Path(__file__).with_name("process.py")


class Keeper(AbstractContextManager["Keeper"]):
    """The keeper process of a launch, started with `options`; the process ends with this context manager."""

    def __init__(self, options: KeeperOptions) -> None:
        self.options = options
        self._token = ""
        self._streams: list[tuple[Stream, int]] = []
        self._pids: list[int] = []
        self._process, self._channel = self._start()

    def __exit__(self, *_: object) -> None:
        """End the process."""
        with suppress(OSError):  # somebody has killed it
            self._channel.send("end")
        self._channel.connection.close()
        self._process.wait()

    def begin_attempt(self, token: str) -> None:
        """Forget the last attempt's ranks; only the environment of the next ranks has the text `token`."""
        self._token, self._streams, self._pids = token, [], []
        self._send("attempt", token=token)

    def add_stream(self, stream: Stream, file: int) -> None:
        """Have the keeper show an output of a rank; `file` stays open here until the next attempt."""
        self._streams.append((stream, file))
        self._send("stream", [file], stream=asdict(stream))

    def set_ranks(self, pids: Sequence[int]) -> None:
        """Tell the keeper the ids of the ranks' processes."""
        self._token, self._pids = "", list(pids)
        self._send("ranks", pids=self._pids)

    def say(self, text: str) -> None:
        """Show a line of the launcher without cutting into a rank's line."""
        if not self._send("say", text=text):
            self._send("say", text=text)

    def drain(self) -> None:
        """Wait until all output of the ranks is shown, after the ranks have ended."""
        if self._send("drain"):
            self._answer()

    def last_lines(self, rank: int, count: int) -> list[str]:
        """Return the last lines of a rank; no lines if the keeper has died."""
        if not count:
            return []
        answer = self._answer() if self._send("tail", rank=rank, count=count) else None
        return [] if answer is None else list(answer["lines"])

    def ensure_running(self) -> None:
        """Replace the keeper if it was killed. The ranks notice nothing; output that the keeper held is lost."""
        if self._process.poll() is None:
            return
        self._channel.connection.close()
        self._process, self._channel = self._start()
        self._channel.send("attempt", token=self._token)
        for stream, file in self._streams:
            self._channel.send("stream", [file], stream=asdict(stream))
        if self._pids:
            self._channel.send("ranks", pids=self._pids)

    def _start(self) -> tuple[subprocess.Popen[bytes], ProcessLink]:
        program, options = (sys.executable, "-IS", str(_PROCESS)), json.dumps(asdict(self.options))
        process, connection = start_linked(
            lambda number: (*program, str(number), options), stdin=subprocess.DEVNULL
        )
        return process, ProcessLink(connection)

    def _send(self, kind: str, files: Sequence[int] = (), **content: Any) -> bool:
        """Send a message. If the keeper has died, replace it, tell the new one all earlier facts, return False."""
        try:
            self._channel.send(kind, files, **content)
        except OSError:
            self._process.wait()
            self.ensure_running()
            return False
        return True

    def _answer(self) -> dict[str, Any] | None:
        """Wait for one message; None if the process has died."""
        while (messages := self._channel.receive()) is not None:
            if messages:
                return messages[0]
        return None
