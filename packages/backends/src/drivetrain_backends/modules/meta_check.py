"""A check for models on the meta device, which have no values yet."""

from itertools import chain

from torch import nn


def check_values(model: nn.Module) -> None:
    """Refuse a model on the meta device, whose tensors cannot be moved to a device."""
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if tensor.is_meta:
            raise ValueError(
                f"{type(model).__name__}: {name} is on the meta device and has no values. Build the model with "
                "values, or inside accelerator.building(), which makes it on the run's device; or say "
                "backend='fsdp', which fills modules that have reset_parameters()"
            )
