"""The values of weights that hooks keep off every device."""

from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain_accelerate.models.align_devices import align_module_device, has_offloaded_params
from drivetrain_accelerate.models.module_tensors import Where, set_module_tensor_to_device
from drivetrain_accelerate.models.offload_folder import Entry, OffloadedWeightsLoader
from drivetrain_dispatch.planning.device_map import place_of


def get_state_dict_offloaded_model(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict of a model with the values of offloaded weights, in host memory."""
    held = {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, Tensor)}
    for prefix, module in model.named_modules():
        if has_offloaded_params(module) and any(tensor.is_meta for tensor in module.state_dict().values()):
            with align_module_device(module, torch.device("cpu")):
                inner = {
                    f"{prefix}.{name}" if prefix else name: each for name, each in module.state_dict().items()
                }
                held |= {name: each.detach().clone() for name, each in inner.items() if not each.is_meta}
    return held


def get_state_dict_from_offload(
    module: nn.Module,
    module_name: str,
    state_dict: dict[str, str | Tensor],
    device_to_put_offload: Where = "cpu",
) -> dict[str, str | Tensor]:
    """Fill the values of the weights of an offloaded module into a state dict.

    Args:
        module: The module whose weights are offloaded.
        module_name: The name of one of its weights.
        state_dict: The state dict; changed in place.
        device_to_put_offload: The device of the values.

    Returns:
        The same state dict.
    """
    root = module_name.rpartition(".")[0]
    prefix = f"{root}." if root else ""
    place = place_of(device_to_put_offload)
    assert isinstance(place, torch.device)
    with align_module_device(module, place):
        for name, value in module.state_dict().items():
            if prefix + name in state_dict:
                state_dict[prefix + name] = value.detach().clone()
    return state_dict


def load_offloaded_weights(
    model: nn.Module, index: dict[str, Entry] | None, offload_folder: str | PathLike[str]
) -> None:
    """Read the weights of an offload folder into a model, in host memory.

    Args:
        model: The model; changed in place.
        index: The index of the weights to read.
        offload_folder: The folder that holds the weights.
    """
    if not index:
        return
    weights = OffloadedWeightsLoader(save_folder=offload_folder, index=index)
    for name in index:
        value: Any = weights[name]
        set_module_tensor_to_device(model, name, "cpu", value=value)
