"""A check for parameters whose gradients FSDP cannot shard."""

import torch
from torch import nn

from drivetrain_backends.modules.wrap_policy import class_name

_SPARSE = (nn.Embedding, nn.EmbeddingBag)


def check_trainable(model: nn.Module) -> None:
    """Refuse a model with trainable parameters whose gradients cannot be sharded.

    Raises:
        ValueError: A parameter is complex, or gets sparse gradients; the message names it.
    """
    for prefix, module in model.named_modules():
        for attribute, parameter in module.named_parameters(recurse=False):
            if not parameter.requires_grad:
                continue
            name = f"{prefix}.{attribute}".lstrip(".")
            if parameter.is_complex():
                raise ValueError(
                    f"{class_name(model)}: {name} is complex ({str(parameter.dtype)[6:]}), and FSDP divides and "
                    "reduces real numbers: keep it as two real parts (torch.view_as_real), or use backend='ddp'"
                )
            if isinstance(module, _SPARSE) and module.sparse and parameter.layout is torch.strided:
                raise ValueError(
                    f"{class_name(model)}: {name} gets sparse gradients ({type(module).__name__}(sparse=True)), "
                    "which FSDP does not reduce: say sparse=False, or use backend='ddp'"
                )
