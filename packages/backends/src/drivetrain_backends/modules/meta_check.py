"""Models that have no values yet."""

from itertools import chain

from torch import nn


def check_values(model: nn.Module) -> None:
    """Refuse a model on meta, where nothing can be moved to a device.

    Raises:
        ValueError: A parameter or buffer is; the message names the first.
    """
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if tensor.is_meta:
            raise ValueError(
                f"{type(model).__name__}: {name} is on the meta device and has no values. Build the model with "
                "values, or inside accelerator.building(), which makes it on the run's device; or say "
                "backend='fsdp', which fills modules that have reset_parameters()"
            )
