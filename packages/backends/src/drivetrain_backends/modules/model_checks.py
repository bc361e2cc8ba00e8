"""Checks of models before they are prepared. The module imports no backend, so that an import is cheap."""

from collections.abc import Sequence
from itertools import chain

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from drivetrain_backends.modules.autocast_forward import PreparedForward
from drivetrain_backends.modules.compile import unwrap_compiled
from drivetrain_backends.modules.module_proxy import ModuleProxy


def check_new(models: Sequence[nn.Module]) -> None:
    """Refuse models that are already prepared or wrapped."""
    for model in models:
        inner = unwrap_compiled(model)
        if isinstance(inner, DistributedDataParallel) and not isinstance(inner, ModuleProxy):
            raise ValueError(
                f"{type(inner.module).__name__} is wrapped in torch's DistributedDataParallel: the backend averages "
                "gradients by itself. Pass the module inside to prepare(), model.module"
            )
        wrapped = inner.module if isinstance(inner, ModuleProxy) else inner
        if inner is not wrapped or isinstance(model, PreparedForward) or isinstance(inner, PreparedForward):
            raise ValueError(
                f"{type(wrapped).__name__} is prepared already; prepare() a model once, or free_memory() and "
                "prepare() the module that you built"
            )


def check_values(model: nn.Module) -> None:
    """Refuse a model on the meta device, whose tensors cannot be moved to a device."""
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if tensor.is_meta:
            raise ValueError(
                f"{type(model).__name__}: {name} is on the meta device and has no values. Build the model with "
                "values, or inside accelerator.building(), which makes it on the run's device; or say "
                "backend='fsdp', which fills modules that have reset_parameters()"
            )


def check_no_renormalising(model: nn.Module, because: str) -> None:
    """Refuse embeddings with `max_norm`, whose forward writes into the weights."""
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
            raise ValueError(
                f"{name or type(model).__name__}: {type(module).__name__}(max_norm={module.max_norm}) scales the "
                f"rows that it looks up in place, in its forward, and {because}. Leave max_norm out, and bound all "
                "rows after each step, on all ranks alike, inside accelerator.gathered(model, write=True): "
                "weight.copy_(weight.renorm(2, 0, max_norm)) under torch.no_grad()"
            )


def check_not_lazy(model: nn.Module) -> None:
    """Refuse parameters that get their shape at the first forward."""
    for name, parameter in model.named_parameters():
        if nn.parameter.is_lazy(parameter):
            raise ValueError(
                f"{type(model).__name__}: {name} has no shape yet (a lazy module), and ranks agree on shapes before "
                "they train: run one batch through the model before prepare(), and build the optimizer after it"
            )
