"""Store the weights of layers in one dtype, and compute in another."""

import re

import torch
from torch import nn

from drivetrain_accelerate.models.module_hooks import ModelHook, add_hook_to_module
from drivetrain_accelerate.plugins.constants import SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING


class LayerwiseCastingHook(ModelHook):
    """A hook by which a layer computes in another dtype than the one its weights are stored in.

    Args:
        storage_dtype: The dtype of its weights between the forwards.
        compute_dtype: The dtype in a forward.
        non_blocking: Whether copies may go on after the call.
    """

    def __init__(self, storage_dtype: torch.dtype, compute_dtype: torch.dtype, non_blocking: bool) -> None:
        self.storage_dtype = storage_dtype
        self.compute_dtype = compute_dtype
        self.non_blocking = non_blocking

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
    """Add a `LayerwiseCastingHook` to each linear layer, convolution and embedding in a module.

    Args:
        module: The module; changed in place.
        storage_dtype: The dtype of weights between the forwards.
        compute_dtype: The dtype in a forward.
        skip_modules_pattern: Regular expressions; modules whose name one is found in are left as they are.
        skip_modules_classes: Classes of modules that are left as they are, with all inside.
        non_blocking: Whether copies may go on after the call.
    """
    patterns = (
        (skip_modules_pattern,) if isinstance(skip_modules_pattern, str) else skip_modules_pattern or ()
    )
    _attach(
        module,
        "",
        LayerwiseCastingHook(storage_dtype, compute_dtype, non_blocking),
        patterns,
        skip_modules_classes,
    )


def _attach(
    module: nn.Module,
    name: str,
    like: LayerwiseCastingHook,
    patterns: tuple[str, ...],
    classes: tuple[type[nn.Module], ...] | None,
) -> None:
    if isinstance(module, classes or ()) or any(re.search(pattern, name) for pattern in patterns):
        return
    if isinstance(module, SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING):
        hook = LayerwiseCastingHook(like.storage_dtype, like.compute_dtype, like.non_blocking)
        add_hook_to_module(module, hook, append=True)
        return
    for inner, child in module.named_children():
        _attach(child, f"{name}.{inner}" if name else inner, like, patterns, classes)
