"""A check for parameters whose gradients FSDP cannot shard."""

import torch
from torch import nn

from drivetrain_backends.compat import names_of_hooks
from drivetrain_backends.modules.packed_weights import is_packed, is_wrapper
from drivetrain_backends.modules.parameter_writes import check_no_renormalising, check_not_lazy
from drivetrain_backends.modules.wrap_policy import class_name

_SPARSE = (nn.Embedding, nn.EmbeddingBag)


def check_trainable(model: nn.Module) -> None:
    """Refuse trainable parameters whose gradients cannot be sharded, and weights packed in a floating dtype."""
    check_not_lazy(model)
    check_no_renormalising(model, "FSDP drops what is written into gathered parameters")
    for prefix, module in model.named_modules():
        for attribute, parameter in module.named_parameters(recurse=False):
            name = f"{prefix}.{attribute}".lstrip(".")
            if not parameter.requires_grad:
                _check_packed(name, parameter)
                continue
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
            if any(hook.startswith("register_multi_grad_hook.") for hook in names_of_hooks(parameter)):
                raise ValueError(
                    f"{class_name(model)}: {name} has a hook of register_multi_grad_hook, which would never run, as "
                    "FSDP lets gradients come to gathered parameters: set a hook on each by "
                    "parameter.register_hook, or use backend='ddp'"
                )


def _check_packed(name: str, parameter: nn.Parameter) -> None:
    """Refuse a weight of bitsandbytes that would be divided: its layer's forward puts another one in its place."""
    kind = type(parameter)
    if is_packed(parameter) and not is_wrapper(parameter) and parameter.is_floating_point():
        raise ValueError(
            f"{name} is a {kind.__name__} of bitsandbytes held in {str(parameter.dtype)[6:]}: FSDP2 would divide "
            "it, and the forward of bitsandbytes replaces a weight that was gathered. Build the layer with "
            "quant_storage=torch.uint8 (bnb_4bit_quant_storage in transformers) and move the model to its device "
            "before prepare(): packed weights are then kept whole on each rank, and the adapters are divided; or use "
            "backend='ddp'"
        )
