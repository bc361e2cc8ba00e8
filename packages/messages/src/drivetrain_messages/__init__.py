"""Words that messages of every package share: byte sizes, the nearest name, lists cut short, counts, tables."""

from drivetrain_messages.byte_sizes import SIZE_UNITS, format_size, parse_size
from drivetrain_messages.console import say
from drivetrain_messages.name_lists import format_count, list_some
from drivetrain_messages.near_names import find_near, suggest
from drivetrain_messages.tables import format_table

__all__ = [
    "SIZE_UNITS",
    "find_near",
    "format_count",
    "format_size",
    "format_table",
    "list_some",
    "parse_size",
    "say",
    "suggest",
]
