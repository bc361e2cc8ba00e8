"""Write to an output in a thread, so that a slow terminal or a full pipe stops nothing else.

Standard library only, as the keeper process imports it without site-packages.
"""

import os
import select
from collections import deque
from threading import Condition, Thread

# Beyond this, ranks wait for the output, as they do for any terminal or pipe.
MAX_PENDING_BYTES = 8 << 20
_WRITE_BYTES = 1 << 18


class OutputThread:
    """The bytes on their way to one output.

    Args:
        file: The file descriptor of the output.
    """

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
        return self._pending_bytes > MAX_PENDING_BYTES

    @property
    def is_empty(self) -> bool:
        """True if all has been written, or nobody reads the output any more."""
        return self._pending_bytes == 0

    def write(self, data: bytes) -> None:
        """Add bytes; comes back at once."""
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
            self._write_all(memoryview(data))
            with self._changed:
                self._pending_bytes -= len(data)

    def _write_all(self, data: memoryview) -> None:
        while data and not self._is_broken:
            try:
                data = data[os.write(self._file, data[:_WRITE_BYTES]) :]
            except BlockingIOError:  # another program has made the terminal non-blocking
                select.select([], [self._file], [], 1.0)
            except OSError:  # the reader has gone: the ranks go on without it
                self._is_broken = True
