"""The scales of delayed scaling that a layer of Transformer Engine keeps from step to step, as tensors."""

from typing import Any

from torch import Tensor, nn

# The library's key for each pass, and the suffix that we give its tensors.
_PASSES = {"scaling_fwd": "forward", "scaling_bwd": "backward"}
_TENSORS = ("scale", "amax_history")


def te_scaling_state(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of delayed scaling that a layer works with; a checkpoint is loaded by copying into them.

    They are `scale_forward` of shape (3,) for input, weight and output, `amax_history_forward` of shape
    (amax_history_len, 3), and both for the backward, with 2 for the gradients of output and input, all in fp32. Empty
    before the first forward (`begin_te_scaling` makes them earlier), and with other recipes, which keep nothing.
    """
    kept: Any = getattr(module, "fp8_meta", {})
    return {
        f"{name}_{phase}": getattr(kept[key], name)
        for key, phase in _PASSES.items()
        for name in _TENSORS
        if hasattr(kept.get(key), name)
    }


def begin_te_scaling(module: nn.Module, recipe: object) -> None:
    """Make the tensors of delayed scaling, on a CUDA device, before the first forward, which then takes them over."""
    layer: Any = module
    layer.fp8_meta.update(recipe=recipe, num_gemms=1)
    layer.init_fp8_meta_tensors(recipe)
