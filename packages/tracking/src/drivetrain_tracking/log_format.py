"""The names and marks of a run's log, which its writer and all of its readers share."""

from collections.abc import Mapping
from types import MappingProxyType

LOG_NAME = "log.jsonl"

# The names of the log's own members: nobody's values can have them.
RESERVED_NAMES = ("step", "time", "event", "attempt", "media", "crc")

# The strings that stand for the floats that JSON lacks.
NOT_FINITE: Mapping[str, float] = MappingProxyType(
    {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}
)

# What stands before the checksum of a line, which has eight hexadecimal digits, and what stands behind it.
CHECKSUM_MARK = b', "crc": "'
CHECKSUM_END = b'"}'
