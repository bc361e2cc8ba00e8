"""Samples on disk: JSON lines, written as they come."""

import json
import logging
import math
from collections.abc import Mapping, Sequence
from io import TextIOWrapper
from pathlib import Path

_logger = logging.getLogger(__name__)
_FLUSH_EVERY = 10  # lines


class SampleStream:
    """A file of JSON lines. A full disk loses samples, not the run: one warning, and lost lines are counted."""

    def __init__(self, file: Path, header: Mapping[str, object]) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        self._path = file
        self._file: TextIOWrapper | None = file.open("w", encoding="utf-8")
        self.num_lost = 0
        self._num_lines = 0
        self._write(json.dumps(header))

    def write(self, names: Sequence[str], row: Sequence[float], *, phase: str, step: int | None) -> None:
        """Write one sample; numbers that are not known are left out."""
        values: dict[str, object] = {
            name: int(value) if value.is_integer() else round(value, 6)
            for name, value in zip(names, row, strict=True)
            if math.isfinite(value)
        }
        if phase:
            values["phase"] = phase
        if step is not None:
            values["step"] = step
        self._write(json.dumps(values))

    def close(self) -> None:
        """Write what is left and close the file."""
        file, self._file = self._file, None
        if file is None:
            return
        try:
            file.close()
        except OSError as error:
            self._lose(error)

    def _write(self, line: str) -> None:
        if self._file is None:
            self.num_lost += 1
            return
        try:
            self._file.write(f"{line}\n")
            self._num_lines += 1
            if self._num_lines % _FLUSH_EVERY == 1:
                self._file.flush()
        except OSError as error:
            self._lose(error)

    def _lose(self, error: OSError) -> None:
        if not self.num_lost:
            _logger.warning("samples of memory are lost from here on: %s: %s", self._path, error)
        self.num_lost += 1
