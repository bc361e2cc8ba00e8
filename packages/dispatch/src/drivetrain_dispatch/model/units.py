"""Which weights come together: a unit is brought when its module is called, and leaves when the call is over."""

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from drivetrain_dispatch.errors import DeviceMapError
from drivetrain_dispatch.model.sizes import enclosing_modules, listed, named_tensors

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
    modules = dict(model.named_modules(remove_duplicate=False))
    unit_of, chosen = UnitNames(modules, whole), set(offloaded)
    held: dict[str, dict[str, Tensor]] = {}
    for name, tensor in named_tensors(model):
        if name in chosen:
            held.setdefault(unit_of(name), {})[name] = tensor
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


class UnitNames:
    """Which unit each tensor of a model is part of: the outermost module around it whose weights come at once.

    Args:
        modules: Of the model, by every name.
        whole: Names of module classes of which all weights come at once.

    Raises:
        ValueError: `whole` names a class that the model does not have.
    """

    def __init__(self, modules: Mapping[str, nn.Module], whole: Collection[str] = ()) -> None:
        whole = listed(whole)
        kinds = {type(module) for module in modules.values()}
        if unknown := sorted(set(whole) - {each.__name__ for kind in kinds for each in kind.__mro__}):
            raise ValueError(
                f"preload_module_classes={unknown}: the model has no module of such a class; name classes as "
                "type(module).__name__ does"
            )
        at_once = {
            kind
            for kind in kinds
            if issubclass(kind, REACH_INSIDE) or any(each.__name__ in whole for each in kind.__mro__)
        }
        self.at_once = {name for name, module in modules.items() if type(module) in at_once}
        only_hold = {kind for kind in kinds if issubclass(kind, _ONLY_HOLD)}
        self._only_hold = {name for name, module in modules.items() if type(module) in only_hold}
        self._plain = not (self.at_once or self._only_hold)

    def __call__(self, tensor: str) -> str:
        """The name of the unit: a module that stays whole, or the innermost that is called."""
        if self._plain:
            return tensor.rpartition(".")[0]
        around = list(enclosing_modules(tensor))
        called = [name for name in around if name not in self._only_hold]
        return next((name for name in around if name in self.at_once), called[-1] if called else "")
