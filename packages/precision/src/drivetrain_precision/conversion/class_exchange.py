"""Give a layer another class in place, and take it back.

The layer stays the same object: its owners, its hooks, its parameters and their optimizers stay valid, and its state
dict keeps the names of a plain layer.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

Owner = Literal["fp8", "qat"]
_RECORD = "class_exchange"


@dataclass(frozen=True, slots=True)
class ClassExchange:
    """The record of an exchange, kept by the layer: its old class and the names that were added."""

    owner: Owner  # the purpose of the exchange, which alone undoes it
    plain: type[nn.Module]
    attributes: tuple[str, ...]
    buffers: tuple[str, ...]  # no part of the layer's state dict
    modules: tuple[str, ...] = ()
    recipe: str = ""


def exchange_class(module: nn.Module, like: nn.Module, *, owner: Owner, recipe: str = "") -> nn.Module:
    """Give a module the class of `like`, with the attributes, buffers and modules that it lacks; return the module.

    The class of `like` must be a subclass of the module's, and `name_clash` must return None. Parameters stay.
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
    record = ClassExchange(owner, type(module), tuple(attributes), tuple(buffers), tuple(modules), recipe)
    setattr(module, _RECORD, record)
    module.__class__ = type(like)
    return module


def added_names(module: nn.Linear) -> frozenset[str]:
    """Return the names of the attributes, parameters, buffers and modules that a user added to a plain layer."""
    return _names_in(module) - _names_in(nn.Linear(1, 1, device="meta"))


def name_clash(names: Iterable[str], like: nn.Module) -> str | None:
    """Return why a layer with added names cannot get the class of `like`; None if it can."""
    clashing = sorted(name for name in names if hasattr(like, name) and not hasattr(nn.Linear, name))
    return f"has {clashing[0]!r} of its own, a name that {type(like).__name__} uses" if clashing else None


def _names_in(module: nn.Module) -> frozenset[str]:
    held = (
        module.named_parameters(recurse=False),
        module.named_buffers(recurse=False),
        module.named_children(),
    )
    return frozenset(vars(module)).union(*({name for name, _ in each} for each in held))


def exchange_of(module: nn.Module) -> ClassExchange | None:
    """Return the record of a module's exchange; None for an unchanged module."""
    return vars(module).get(_RECORD)  # of its own: a wrapper may hand on the attributes of the module inside


def undo_exchange(module: nn.Module) -> nn.Module:
    """Undo `exchange_class` in place, and return the module."""
    if (record := exchange_of(module)) is not None:
        for name in (*record.attributes, *record.buffers, *record.modules, _RECORD):
            delattr(module, name)
        module.__class__ = record.plain
    return module
