"""Read a file as it grows."""

from codecs import getincrementaldecoder
from pathlib import Path


class OutputTail:
    """A file whose new text is read bit by bit; it may not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0
        self._decoder = getincrementaldecoder("utf-8")("replace")

    def read(self) -> str:
        """Return the text that was added since the last call; empty if there is none."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._position)
                new = file.read()
        except FileNotFoundError:
            return ""
        self._position += len(new)
        return self._decoder.decode(new)
