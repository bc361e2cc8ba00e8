"""Store the weights of layers in one dtype, and compute in another."""

import re
from dataclasses import dataclass

import torch
from torch import nn

from drivetrain_accelerate.models.module_hooks import ModelHook, add_hook_to_module
from drivetrain_accelerate.plugins.constants import SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING
from drivetrain_dispatch.model.model_layout import listed


@dataclass(eq=False)
class LayerwiseCastingHook(ModelHook):
    """A hook by which a layer computes in another dtype than the one its weights are stored in."""

    storage_dtype: torch.dtype
    compute_dtype: torch.dtype
    non_blocking: bool

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Convert the weights to the storage dtype."""
        return module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)

    def pre_forward(
        self, module: nn.Module, *args: object, **kwargs: object
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        """Convert the weights to the compute dtype."""
        module.to(dtype=self.compute_dtype, non_blocking=self.non_blocking)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: object) -> object:
        """Convert the weights back."""
        module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)
        return output


def attach_layerwise_casting_hooks(
    module: nn.Module,
    storage_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    skip_modules_pattern: str | tuple[str, ...] | None = None,
    skip_modules_classes: tuple[type[nn.Module], ...] | None = None,
    non_blocking: bool = False,
) -> None:
    """Add a `LayerwiseCastingHook` to each linear layer, convolution and embedding in a module."""
    patterns = listed(skip_modules_pattern or ())

    def attach(each: nn.Module, name: str) -> None:
        if isinstance(each, skip_modules_classes or ()) or any(re.search(one, name) for one in patterns):
            return
        if isinstance(each, SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING):
            hook = LayerwiseCastingHook(storage_dtype, compute_dtype, non_blocking)
            add_hook_to_module(each, hook, append=True)
            return
        for inner, child in each.named_children():
            attach(child, f"{name}.{inner}" if name else inner)

    attach(module, "")
