"""Text that messages of all packages share: byte sizes, near names, shortened lists, counts, tables, arguments."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from drivetrain_messages.byte_sizes import SIZE_UNITS as SIZE_UNITS
    from drivetrain_messages.byte_sizes import format_size as format_size
    from drivetrain_messages.byte_sizes import parse_size as parse_size
    from drivetrain_messages.command_arguments import argument as argument
    from drivetrain_messages.console import say as say
    from drivetrain_messages.name_lists import format_count as format_count
    from drivetrain_messages.name_lists import list_some as list_some
    from drivetrain_messages.near_names import find_near as find_near
    from drivetrain_messages.near_names import suggest as suggest
    from drivetrain_messages.tables import format_table as format_table

# Module -> its public names.
_NAMES = {
    "byte_sizes": "format_size parse_size SIZE_UNITS",
    "command_arguments": "argument",
    "console": "say",
    "name_lists": "format_count list_some",
    "near_names": "find_near suggest",
    "tables": "format_table",
}

if not TYPE_CHECKING:  # else a type checker would accept any name
    from drivetrain_messages.lazy_names import lazy_names as _lazy_names

    __all__, __getattr__, __dir__ = _lazy_names(__name__, _NAMES)
