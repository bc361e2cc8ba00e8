"""Models that drivetrain_dispatch has dispatched: what libraries read of them, and how they become ordinary again."""

from torch import nn

from drivetrain_dispatch import remove_hooks
from drivetrain_dispatch.offload.dispatched_model import is_dispatched
from drivetrain_dispatch.offload.forward_hooks import MethodWrapper

_MAP = "hf_device_map"


def dispatched_parts(module: nn.Module) -> list[nn.Module]:
    """Return the dispatched models in a module, which may be one itself."""
    return [each for each in module.modules() if is_dispatched(each)]


def is_fetched_at_use(module: nn.Module) -> bool:
    """Return whether a dispatch sees to the weights of a module, whose forward it has replaced."""
    return any(isinstance(vars(module).get(name), MethodWrapper) for name in ("forward", "_old_forward"))


def forget_dispatch(module: nn.Module) -> None:
    """Make the dispatched models in a module ordinary; each keeps its `hf_device_map`, as libraries read it later."""
    for model in dispatched_parts(module):
        device_map = vars(model).get(_MAP)
        remove_hooks(model)
        if device_map is not None:
            show_map(model, device_map)


def show_map(model: nn.Module, device_map: object) -> None:
    """Set the `hf_device_map` of a model."""
    setattr(model, _MAP, device_map)
