"""The lines of a spool: JSON objects that end in a checksum of themselves.

```text
{"step": 10, "time": 1763690003.9, "loss": 2.31, "crc": "5e3b12af"}
```

The checksum is the CRC-32 of all bytes before `, "crc"`. It reveals a line that was cut, or that two programs wrote
into at once. Readers unaware of the checksum see one more member.
"""

import json
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, cast
from zlib import crc32

from drivetrain_tracking.values.plain import Plain

LOG_NAME = "log.jsonl"

# The names of the log's own members: nobody's values can have them.
RESERVED_NAMES = ("step", "time", "event", "attempt", "media", "crc")

# The strings that stand for the floats that JSON lacks.
NOT_FINITE: Mapping[str, float] = MappingProxyType(
    {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}
)

_ENCODER = json.JSONEncoder(allow_nan=False)  # json.dumps would make one for each line
_MARK, _END = b', "crc": "', b'"}'  # before and behind the eight hexadecimal digits of a checksum
_TAIL = len(_MARK) + 8 + len(_END)
_AT_MARK, _AT_SUM = slice(-_TAIL, len(_MARK) - _TAIL), slice(-8 - len(_END), -len(_END))


def encode(record: Mapping[str, Plain]) -> bytes:
    """Return the line of a record, with its line break. NaN and infinities, which JSON lacks, become strings."""
    try:
        body = _ENCODER.encode(record).encode()[:-1]
    except ValueError:  # a NaN or an infinity: rare, and expensive to look for in every record
        body = _ENCODER.encode(_strict(dict(record))).encode()[:-1]
    if body == b"{":
        raise ValueError("an empty record has no line")
    return b"%b%b%08x%b\n" % (body, _MARK, crc32(body), _END)


def has_checksum(line: bytes) -> bool:
    """Return whether a line, given without its break, has any checksum, right or wrong."""
    return line[_AT_MARK] == _MARK


def is_complete(line: bytes) -> bool:
    """Return whether the checksum of a line matches the line's bytes."""
    return line[_AT_SUM] == b"%08x" % crc32(line[:-_TAIL])


def decode(line: bytes) -> dict[str, Any] | None:
    """Return the record of a line, given without its break, or None if the line is not complete."""
    if not (has_checksum(line) and is_complete(line) and line.endswith(_END)):
        return None
    try:
        return json.loads(line[:-_TAIL] + b"}")
    except (ValueError, RecursionError):  # complete, and no record: another program has written it
        return None


def restore_numbers(value: Any) -> Any:
    """Return a value of a line, with the strings for NaN and infinities turned back into floats."""
    if isinstance(value, str):
        return NOT_FINITE.get(value, value)
    if isinstance(value, dict):
        return {name: restore_numbers(item) for name, item in cast("dict[str, Any]", value).items()}
    if isinstance(value, list):
        return [restore_numbers(item) for item in cast("list[Any]", value)]
    return value


def _strict(value: Plain) -> Plain:
    """Return the value with NaN and infinities replaced by strings that JavaScript and Python parse as numbers."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_strict(item) for item in value]
    return value
