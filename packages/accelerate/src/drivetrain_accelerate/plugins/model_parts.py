"""The facts that plugins say of a model's parts: a tensor's shape and dtype, a module's class."""

from torch import nn


def get_module_class_from_name(module: nn.Module, name: str) -> type[nn.Module] | None:
    """Return the class of this name among a module and those inside of it; None if there is none."""
    found = (type(inner) for inner in module.modules() if type(inner).__name__ == name)
    return next(found, None)
