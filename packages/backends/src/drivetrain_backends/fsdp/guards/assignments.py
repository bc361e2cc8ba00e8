"""Assignments of parameters to the modules of a sharded model, which would not be sharded."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import cast
from weakref import WeakKeyDictionary

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.hooks import RemovableHandle

from drivetrain_backends.errors import UnshardedParameterError


class AssignmentGuard:
    """A guard that refuses to assign a parameter to a watched module, from `watch` until `close`."""

    def __init__(self) -> None:
        self._names: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
        self._paused = False
        self._handle: RemovableHandle | None = None

    def watch(self, model: nn.Module) -> None:
        """Watch every module of a model, except those with their own `__setattr__`."""
        if self._handle is None:
            check = cast("Callable[..., None]", self._check)
            self._handle = register_module_parameter_registration_hook(check)
        for name, module in model.named_modules():
            if type(module).__setattr__ is nn.Module.__setattr__:
                self._names[module] = name

    def forget(self, model: nn.Module) -> None:
        """Stop watching a model."""
        for module in model.modules():
            self._names.pop(module, None)

    @contextmanager
    def paused(self) -> Generator[None]:
        """Allow parameters to be assigned in the block."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def close(self) -> None:
        """Stop watching all modules, until `watch` is called again."""
        self._names.clear()
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _check(self, module: nn.Module, attribute: str, parameter: nn.Parameter | None) -> None:
        if self._paused or parameter is None or module not in self._names:
            return
        name = f"{self._names[module]}.{attribute}".lstrip(".")
        raise UnshardedParameterError(
            f"{name} is assigned after prepare(): the new tensor would not be sharded, its gradients not averaged, "
            "and the optimizer would not step it. Change values in place, inside gathered(write=True), or build the "
            "model before prepare()"
        )
