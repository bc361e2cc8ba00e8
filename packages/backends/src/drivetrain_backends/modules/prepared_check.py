"""A check that models are not prepared yet. It imports no backend, so that the umbrella can ask at no cost."""

from collections.abc import Sequence

from torch import nn

from drivetrain_backends.modules.autocast_forward import PreparedForward
from drivetrain_backends.modules.compile import unwrap_compiled
from drivetrain_backends.modules.module_proxy import ModuleProxy


def check_new(models: Sequence[nn.Module]) -> None:
    """Refuse models that are already prepared.

    Raises:
        ValueError: A model is already prepared.
    """
    for model in models:
        inner = unwrap_compiled(model)
        wrapped = inner.module if isinstance(inner, ModuleProxy) else inner
        if inner is not wrapped or isinstance(model, PreparedForward) or isinstance(inner, PreparedForward):
            raise ValueError(
                f"{type(wrapped).__name__} is prepared already; prepare() a model once, or free_memory() and "
                "prepare() the module that you built"
            )
