"""The hook that libraries find on a module of a dispatched model; by it they reach weights outside of a forward.

peft merges adapters in this way: `pre_forward`, a change of the weights, `post_forward`.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from drivetrain_accelerate.models.align_devices import AlignDevicesHook
from drivetrain_accelerate.models.module_tensors import Where, named_module_tensors, put_tensor
from drivetrain_dispatch.offload.parameter import is_offloaded
from drivetrain_dispatch.planning.device_map import place_of


class DispatchedHook(AlignDevicesHook):
    """A hook that does not run in forwards: the dispatch sees to those. Made anew for another module, it does."""

    def __init__(
        self,
        execution_device: Where | None = None,
        io_same_device: bool = False,
        skip_keys: str | list[str] | None = None,
        module: nn.Module | None = None,
    ) -> None:
        super().__init__(execution_device, io_same_device=io_same_device, skip_keys=skip_keys)
        self._module = None if module is None else ref(module)
        self._stored: dict[str, Tensor] = {}
        self._changed: Mapping[str, Tensor] = {}
        if module is not None:
            self.original_devices = {name: tensor.device for name, tensor in named_module_tensors(module)}

    @property
    def is_shown(self) -> bool:
        """True if it belongs to a module of a dispatched model, in whose forwards it does not run."""
        return self._module is not None

    @property
    def offload(self) -> bool:  # type: ignore[override] so that it is no attribute that a new hook is made with
        """True if the module's weights are elsewhere than where it computes; they are fetched for its forward."""
        module = None if self._module is None else self._module()
        return bool(self._stored) or (
            module is not None and any(map(is_offloaded, _tensors(module).values()))
        )

    @offload.setter
    def offload(self, value: bool) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        if value:
            raise ValueError("offload=True: the dispatch of the model says which weights are offloaded")

    @property
    def weights_map(self) -> Mapping[str, Tensor] | None:  # type: ignore[override]
        """The offloaded weights by name, to read; what is set instead is written to them by `post_forward`."""
        module = None if self._module is None else self._module()
        if module is None or not self.offload:
            return None
        stored = {**_tensors(module), **self._stored}
        return MappingProxyType({name: tensor.detach() for name, tensor in stored.items()})

    @weights_map.setter
    def weights_map(  # pyright: ignore[reportIncompatibleVariableOverride]
        self, value: Mapping[str, Tensor] | None
    ) -> None:
        self._changed = value or {}

    def pre_forward(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Put the offloaded weights of the module on the device that computes, until `post_forward`."""
        place = None if self.execution_device is None else place_of(self.execution_device)
        for name, tensor in _tensors(module).items():
            if is_offloaded(tensor) and isinstance(place, torch.device):
                self._stored[name] = tensor
                value = tensor.detach().to(place)
                is_parameter = isinstance(tensor, nn.Parameter)
                put_tensor(module, name, nn.Parameter(value, tensor.requires_grad) if is_parameter else value)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Write what has changed of these weights to where they are stored."""
        present = _tensors(module)
        for name, stored in self._stored.items():
            value = self._changed.get(name, present[name])
            if present[name] is stored:
                continue
            new = value.detach().to(stored.device, stored.dtype)
            with torch.no_grad():
                if not torch.equal(stored.detach(), new):  # pages of a file that are written to take memory
                    stored.detach().copy_(new)
            put_tensor(module, name, stored)
        self._stored, self._changed = {}, {}
        return output


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return dict(named_module_tensors(module))
