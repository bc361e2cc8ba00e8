"""Keep whole models in host memory, and move each to the device when it is called."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from drivetrain_accelerate.models.module_hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from drivetrain_accelerate.models.module_tensors import Where
from drivetrain_dispatch.offload.device_transfer import move_to_device
from drivetrain_dispatch.planning.device_map import place_of


class CpuOffload(ModelHook):
    """A hook that moves a model to its device when it is called, where it stays."""

    def __init__(
        self, execution_device: Where | None = None, prev_module_hook: "UserCpuOffloadHook | None" = None
    ) -> None:
        self.prev_module_hook = prev_module_hook
        if execution_device is None and (
            found := torch.accelerator.current_accelerator(check_available=True)
        ):
            execution_device = torch.device(found.type, torch.accelerator.current_device_index())
        self.execution_device: Where = "cpu" if execution_device is None else execution_device

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Move the model to the host."""
        return module.to("cpu")

    def pre_forward(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Move the model of the other hook to the host, and this one and its inputs to the device."""
        device = place_of(self.execution_device)
        assert isinstance(device, torch.device)
        if self.prev_module_hook is not None:
            self.prev_module_hook.offload()
        module.to(device)
        return move_to_device(args, device), move_to_device(kwargs, device)


@dataclass(eq=False)
class UserCpuOffloadHook:
    """A model and its hook, for the program to move the model to the host."""

    model: nn.Module
    hook: ModelHook

    def offload(self) -> None:
        """Move the model to the host."""
        self.hook.init_hook(self.model)

    def remove(self) -> None:
        """Remove the hook; the model stays where it is."""
        remove_hook_from_module(self.model)


def cpu_offload_with_hook(
    model: nn.Module,
    execution_device: Where | None = None,
    prev_module_hook: UserCpuOffloadHook | None = None,
) -> tuple[nn.Module, UserCpuOffloadHook]:
    """Keep a model in host memory until it is called; then it stays on the device until the next one moves it."""
    hook = CpuOffload(execution_device, prev_module_hook)
    add_hook_to_module(model, hook, append=True)
    return model, UserCpuOffloadHook(model, hook)
