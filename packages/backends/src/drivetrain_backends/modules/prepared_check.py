"""A check that models are not prepared yet. It imports no backend, so that the umbrella can ask at no cost."""

from collections.abc import Sequence

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
