"""The module that a user calls in place of a wrapped model; attributes are read from and set on the model."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from drivetrain_backends.errors import ReplacedParameterError


class ModuleProxy(nn.Module):
    """A module that forwards attributes it does not have to the user's module, once it is built.

    A subclass sets `module`, and calls `forward_attributes` after its own attributes are set. To copy or pickle the
    proxy gives a copy or pickle of the user's module.
    """

    module: nn.Module

    def forward_attributes(self) -> None:
        """Forward attribute writes, and reads of attributes missing here, to the user's module from now on."""
        self.__dict__["_forwards"] = True

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if not self.__dict__.get("_forwards"):
                raise
            return getattr(self.module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if not self.__dict__.get("_forwards") or name in self.__dict__ or hasattr(type(self), name):
            super().__setattr__(name, value)
        elif isinstance(value, (nn.Module, nn.Parameter)):
            raise ReplacedParameterError(
                f"{name} is assigned to {type(self.module).__name__} after prepare(): nothing would train it. Change "
                "the model before prepare(), or free_memory() and prepare() again; values alone go in with "
                "parameter.copy_(...) under torch.no_grad()"
            )
        elif name.startswith("_") and not hasattr(self.module, name):  # torch's own, about the wrapper
            super().__setattr__(name, value)
        else:
            setattr(self.module, name, value)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load a state dict of the user's module, or of the wrapper, whose names all begin with `module.`."""
        own = {*dict(self.module.named_parameters()), *dict(self.module.named_buffers())}
        if own.isdisjoint(state_dict):
            return super().load_state_dict(state_dict, *args, **kwargs)
        return self.module.load_state_dict(state_dict, *args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.module.__reduce_ex__(protocol)
