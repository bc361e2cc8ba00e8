"""Models compiled by `torch.compile`, whole or a module at a time: the same names as their plain twins.

`torch.compile(module)` gives a wrapper that holds the module as `_orig_mod`, and puts that into every name. In a
checkpoint it is left out, so that a compiled model and a plain one load each other's. (`module.compile()` leaves
names alone.)
"""

from collections.abc import Mapping
from typing import Any

from torch import nn

_WRAPPED = "_orig_mod"


def uncompiled(model: nn.Module) -> nn.Module:
    """The module inside a wrapper of `torch.compile`; a module without one is returned as it is."""
    # Not by its type: importing that loads the whole compiler.
    return getattr(model, _WRAPPED) if _WRAPPED in dict(model.named_children()) else model


def plain_name(name: str) -> str:
    """The name of a parameter or buffer as it is where nothing is compiled."""
    return name.replace(f"{_WRAPPED}.", "")


def plain_state(model: nn.Module) -> dict[str, Any]:
    """A model's `state_dict` under plain names."""
    state = model.state_dict()
    if not any(_WRAPPED in name for name in state):
        return state
    return {plain_name(name): value for name, value in state.items()}


def load_plain_state(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Load a `state_dict`, of a compiled model or a plain one."""
    own = {plain_name(name): name for name in model.state_dict()}
    model.load_state_dict({own.get(plain_name(name), name): value for name, value in state.items()})
