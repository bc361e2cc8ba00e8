"""Names of the interface that a program has replaced by its own, as libraries do for a while."""

import sys
from typing import TypeVar

from drivetrain_accelerate.interface.interface_module import InterfaceModule

Anything = TypeVar("Anything")


def in_use(full_name: str, own: Anything) -> Anything:
    """Return what a name of Accelerate's stands for now.

    Args:
        full_name: The name, such as "accelerate.big_modeling.check_device_map".
        own: The object that this package provides under the name.

    Returns:
        What a program has set in its place; `own` if it has set nothing, or the interface is not installed.
    """
    module, _, name = full_name.rpartition(".")
    found = sys.modules.get(module)
    return vars(found).get(name, own) if isinstance(found, InterfaceModule) else own
