"""Which weights come together: a unit is brought when its module is called, and leaves when the call is over."""

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from drivetrain_dispatch.errors import DeviceMapError
from drivetrain_dispatch.sizes import enclosing_modules, listed, named_tensors

# Modules of torch that use the weights of those inside them without calling them.
REACH_INSIDE = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
# Modules that are never called: the one around them uses what they hold.
_ONLY_HOLD = (nn.ParameterList, nn.ParameterDict)


class Unit(NamedTuple):
    """A module with the tensors that its forward needs.

    Attributes:
        name: Of the module.
        module: It.
        tensors: By the model's names: its own; those of the modules inside too, if it is one that stays whole.
    """

    name: str
    module: nn.Module
    tensors: Mapping[str, Tensor]


def units_of(model: nn.Module, offloaded: Collection[str], *, whole: Collection[str] = ()) -> list[Unit]:
    """The units of a model, in its order. Pure.

    Args:
        model: The model.
        offloaded: Names of the tensors that come and go.
        whole: Names of module classes of which all weights come at once: such as a layer that is compiled, or a
            module that uses the weights of those inside it without calling them.

    Raises:
        ValueError: `whole` names a class that the model does not have.
    """
    whole = listed(whole)
    kinds = {kind.__name__ for module in model.modules() for kind in type(module).__mro__}
    if unknown := sorted(set(whole) - kinds):
        raise ValueError(
            f"preload_module_classes={unknown}: the model has no module of such a class; name classes as "
            "type(module).__name__ does"
        )
    modules = dict(model.named_modules(remove_duplicate=False))
    chosen = set(offloaded)
    stay = {
        name
        for name, module in modules.items()
        if isinstance(module, REACH_INSIDE) or any(kind.__name__ in whole for kind in type(module).__mro__)
    }
    held: dict[str, dict[str, Tensor]] = {}
    for name, tensor in named_tensors(model):
        if name in chosen:
            held.setdefault(_unit_of(name, modules, stay), {})[name] = tensor
    units = {
        # A module that stands in two places is one unit: it is called under either name.
        id(modules[name]): Unit(name, modules[name], held[name])
        for name in reversed(modules)
        if name in held
    }
    return list(reversed(units.values()))


def check_devices(units: Iterable[Unit], devices: Mapping[str, torch.device]) -> None:
    """Check that each unit is computed by one device.

    Args:
        units: The units.
        devices: The device that computes each tensor, by the model's names.

    Raises:
        DeviceMapError: One is not.
    """
    for unit in units:
        found = {devices[name] for name in unit.tensors}
        if len(found) > 1:
            raise DeviceMapError(
                f"device_map: {', '.join(sorted(map(str, found)))} compute parts of {unit.name or 'the model'!r}, "
                "whose weights come all at once: give all of it to one of them, or leave its class out of "
                "preload_module_classes"
            )


def _unit_of(tensor: str, modules: Mapping[str, nn.Module], stay: Collection[str]) -> str:
    """The outermost module around a tensor that stays whole, or the innermost that is called."""
    around = list(enclosing_modules(tensor))
    called = [name for name in around if not isinstance(modules[name], _ONLY_HOLD)]
    return next((name for name in around if name in stay), called[-1] if called else "")
