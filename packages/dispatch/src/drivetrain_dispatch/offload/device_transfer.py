"""Move the inputs of a module to its device, and its outputs back."""

import threading
from collections.abc import Callable, Collection, Mapping
from copy import copy
from dataclasses import fields, is_dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils.hooks import RemovableHandle

from drivetrain_dispatch.model.model_layout import listed
from drivetrain_dispatch.offload.forward_hooks import MethodWrapper, NotCopied, hook_calls


def move_to_device(value: Any, device: torch.device) -> Any:
    """Return a nested value with its tensors on a device; other objects, such as key-value caches, stay."""
    if isinstance(value, Tensor):
        return value if value.device == device else value.to(device, non_blocking=device.type != "cpu")
    if isinstance(value, PackedSequence):
        return cast("Any", value).to(device)  # keeps its batch_sizes on the host
    if isinstance(value, list | tuple):
        items = cast("list[Any] | tuple[Any, ...]", value)
        moved = [move_to_device(item, device) for item in items]
        if all(one is other for one, other in zip(items, moved, strict=True)):
            return items
        if type(items) in (list, tuple):
            return type(items)(moved)
        # Named tuples, and the results of torch.max and similar functions.
        return cast("Callable[[list[Any]], Any]", getattr(items, "_make", type(items)))(moved)
    if isinstance(value, Mapping):
        mapping = cast("Mapping[str, Any]", value)
        moved = {key: move_to_device(item, device) for key, item in mapping.items()}
        if all(moved[key] is item for key, item in mapping.items()):
            return mapping
        if isinstance(mapping, dict):  # a copy, since subclasses may have attributes beside their items
            changed = copy(mapping)
            for key, item in moved.items():  # outputs of transformers and diffusers refuse update()
                changed[key] = item
            return changed
        return cast("Callable[[object], object]", type(mapping))(moved)
    if is_dataclass(value) and not isinstance(value, type):
        moved = {
            field.name: move_to_device(getattr(value, field.name), device)
            for field in fields(value)
            if field.init
        }
        if all(moved[name] is getattr(value, name) for name in moved):
            return value
        return replace(value, **moved)
    return value


class InputMover(NotCopied):
    """A pair of hooks that move inputs to a module's device at each call. With `returns`, outputs move back."""

    def __init__(self, device: torch.device, skip_keys: Collection[str] = (), *, returns: bool) -> None:
        self._device = device
        self._returns = returns
        self._skip_keys = frozenset(listed(skip_keys))
        self._calls = _RunningCalls()

    def attach(self, module: nn.Module) -> list[RemovableHandle | MethodWrapper]:
        """Register the hooks on a module; remove the returned handles in reverse order."""
        return hook_calls(module, self._before, self._after if self._returns else None)

    def _before(
        self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self._returns:
            self._calls.input_devices.append(first_device((args, kwargs)))
        moved = {
            name: value if name in self._skip_keys else move_to_device(value, self._device)
            for name, value in kwargs.items()
        }
        return move_to_device(args, self._device), moved

    def _after(self, _module: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
        device = self._calls.input_devices.pop()
        return output if device is None else move_to_device(output, device)


class _RunningCalls(threading.local):
    """The running calls of each thread, as the devices that their inputs came from."""

    def __init__(self) -> None:
        self.input_devices: list[torch.device | None] = []


def first_device(value: Any) -> torch.device | None:
    """Return the device of the first tensor in a nested value; None if there is none."""
    if isinstance(value, Tensor):
        return value.device
    if is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, field.name) for field in fields(value)]
    if isinstance(value, Mapping):
        value = list(cast("Mapping[str, Any]", value).values())
    if isinstance(value, list | tuple):
        found = (first_device(item) for item in cast("list[Any]", value))
        return next((device for device in found if device is not None), None)
    return None
