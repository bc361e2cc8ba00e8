"""Give a layer another class in place, and take it back.

The layer stays the object that it was: who shares it, its hooks, its parameters and the optimizers that hold them
stay right, and its state has the names of a plain one.
"""

from dataclasses import dataclass
from typing import Any

from torch import nn

_RECORD = "fp8_exchange"


@dataclass(frozen=True, slots=True)
class ClassExchange:
    """The record of what an exchange changed, kept by the layer.

    Attributes:
        plain: The class before.
        attributes: The names of the attributes that were added.
        buffers: The names of the buffers that were added, which are no part of the layer's state dict.
        modules: The names of the modules that were added.
    """

    plain: type[nn.Module]
    attributes: tuple[str, ...]
    buffers: tuple[str, ...]
    modules: tuple[str, ...] = ()


def exchange_class(module: nn.Module, like: nn.Module) -> None:
    """Give a module the class of another one, with the attributes, buffers and modules that it does not have.

    Args:
        module: The module to change.
        like: A module of a subclass of its class; its parameters are left out.
    """
    attributes: dict[str, Any] = {
        name: value for name, value in vars(like).items() if name not in vars(module)
    }
    own = dict(module.named_buffers(recurse=False))
    buffers = {name: each for name, each in like.named_buffers(recurse=False) if name not in own}
    vars(module).update(attributes)
    for name, buffer in buffers.items():
        module.register_buffer(name, buffer, persistent=False)
    held = dict(module.named_children())
    modules = {name: each for name, each in like.named_children() if name not in held}
    for name, each in modules.items():
        module.add_module(name, each.train(module.training))
    record = ClassExchange(type(module), tuple(attributes), tuple(buffers), tuple(modules))
    setattr(module, _RECORD, record)
    module.__class__ = type(like)


def exchange_of(module: nn.Module) -> ClassExchange | None:
    """Return what an exchange changed, or None for a module as its user made it."""
    return getattr(module, _RECORD, None)


def undo_exchange(module: nn.Module) -> None:
    """Undo `exchange_class` in place."""
    record = exchange_of(module)
    if record is None:
        return
    for name in (*record.attributes, *record.buffers, *record.modules, _RECORD):
        delattr(module, name)
    module.__class__ = record.plain
