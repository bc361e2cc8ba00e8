"""The hint for a name that a module of the interface does not have."""

from drivetrain_accelerate.interface.module_table import ModuleTable
from drivetrain_messages import suggest


def missing(table: ModuleTable, module: str, name: str) -> str:
    """Return the end of a message about a missing name: where it is, or which name is near; empty if none is.

    Args:
        table: The modules and names of the interface.
        module: The module that was asked.
        name: The name that it does not have.
    """
    if name.startswith("__"):  # what Python and libraries look for
        return ""
    if places := table.holders.get(name):
        return f": it means several things; import that of {' or '.join(places)}"
    if found := next((each for each in table.names if each.endswith(f".{name}")), None):
        return f": the module is {found}"
    return suggest(name, table.names_in(module)) or suggest(name, table.holders)
