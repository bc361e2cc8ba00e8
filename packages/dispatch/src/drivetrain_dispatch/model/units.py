"""Divide weights into units: a unit is fetched when its module is called and released when the call ends."""

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from drivetrain_dispatch.errors import DeviceMapError
from drivetrain_dispatch.model.model_layout import ModelLayout
from drivetrain_dispatch.model.sizes import enclosing_modules, listed

# Modules of torch that use the weights of their submodules without calling the submodules.
REACH_INSIDE = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
# Modules that are never called: the enclosing module uses the tensors that they hold.
_ONLY_HOLD = (nn.ParameterList, nn.ParameterDict)


class Unit(NamedTuple):
    """A module with the tensors that its forward needs."""

    name: str
    module: nn.Module
    # The module's own tensors, under the model's names; also those of its submodules if it stays whole.
    tensors: Mapping[str, Tensor]


def units_of(layout: ModelLayout, offloaded: Collection[str], *, whole: Collection[str] = ()) -> list[Unit]:
    """Return the units of a model, in its order; modules of the classes in `whole` are fetched all at once. Pure."""
    modules = layout.modules
    unit_of, chosen = UnitNames(modules, whole), set(offloaded)
    held: dict[str, dict[str, Tensor]] = {}
    for name, tensor in layout.tensors.items():
        if name in chosen:
            held.setdefault(unit_of(name), {})[name] = tensor
    units = {
        # A shared module is one unit, as it may be called under any of its names.
        id(modules[name]): Unit(name, modules[name], held[name])
        for name in reversed(modules)
        if name in held
    }
    return list(reversed(units.values()))


def check_devices(units: Iterable[Unit], devices: Mapping[str, torch.device]) -> None:
    """Check that a single device computes each unit."""
    for unit in units:
        found = {devices[name] for name in unit.tensors}
        if len(found) > 1:
            raise DeviceMapError(
                f"device_map: {', '.join(sorted(map(str, found)))} compute parts of {unit.name or 'the model'!r}, "
                "whose weights come all at once: give all of it to one of them, or leave its class out of "
                "preload_module_classes"
            )


class UnitNames:
    """A function from a tensor's name to the name of its unit.

    The unit is the outermost enclosing module whose weights are fetched all at once, otherwise the innermost that is
    called.
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
        """Return the name of a tensor's unit."""
        if self._plain:
            return tensor.rpartition(".")[0]
        around = list(enclosing_modules(tensor))
        called = [name for name in around if name not in self._only_hold]
        return next((name for name in around if name in self.at_once), called[-1] if called else "")
