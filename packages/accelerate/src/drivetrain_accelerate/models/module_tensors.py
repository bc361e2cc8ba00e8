"""List the parameters and buffers of a module, move one to a device, and tie shared parameters."""

import logging
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain_accelerate.compat import tied_weights_keys
from drivetrain_backends import unwrap_compiled
from drivetrain_dispatch.compat import BUFFERS, PARAMETERS
from drivetrain_dispatch.loading.load_target import Assignment, apply_assignments
from drivetrain_dispatch.model.model_layout import nearest_entry
from drivetrain_dispatch.model.quantized_tensor import is_quantized
from drivetrain_dispatch.planning.device_map import place_of
from drivetrain_weights import find_tied_parameters as find_groups
from drivetrain_weights.errors import TiedParametersError

_LOGGER = logging.getLogger(__name__)

Where = int | str | torch.device
# For the address of each tied tensor, its copy on each device.
TiedCopies = MutableMapping[int, dict[torch.device, Tensor]]
_NON_PERSISTENT = "_non_persistent_buffers_set"  # torch has no public name for it


def device_of(where: Where) -> torch.device:
    """Return the device that a value of a device map stands for; for the disk, the meta device."""
    place = place_of(where)
    return torch.device("meta") if place == "disk" else place


def dtype_of(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """Return a dtype, given as a dtype or by a name such as "float16"."""
    if not isinstance(dtype, str):
        return dtype
    found = getattr(torch, dtype.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"dtype={dtype!r}: no dtype of torch is called so; give torch.float16 or 'float16'")
    return found


def named_module_tensors(
    module: nn.Module,
    include_buffers: bool = True,
    recurse: bool = False,
    remove_non_persistent: bool = False,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters of a module, then its buffers, with their names."""
    yield from module.named_parameters(recurse=recurse)
    left_out = get_non_persistent_buffers(module, recurse, fqns=True) if remove_non_persistent else ()
    for name, buffer in module.named_buffers(recurse=recurse) if include_buffers else ():
        if name not in left_out:
            yield name, buffer


def get_non_persistent_buffers(module: nn.Module, recurse: bool = False, fqns: bool = False) -> set[str]:
    """Return the names of the buffers of a module that a state dict does not hold."""
    found: set[str] = set()
    for prefix, each in module.named_modules() if recurse else [("", module)]:
        own: set[str] = getattr(each, _NON_PERSISTENT)
        found |= {f"{prefix}.{name}" if fqns and prefix else name for name in own}
    return found


def set_module_tensor_to_device(
    module: nn.Module,
    tensor_name: str,
    device: Where,
    value: Tensor | None = None,
    dtype: str | torch.dtype | None = None,
    fp16_statistics: torch.HalfTensor | None = None,
    tied_params_map: TiedCopies | None = None,
    non_blocking: bool = False,
    clear_cache: bool = True,  # torch's cache is left as it is: what is freed is used again
) -> None:
    """Put a parameter or buffer on a device, with its present values or new ones.

    Integer and boolean values keep their dtype. `clear_cache` changes nothing: freed memory is used again anyway. A
    ValueError refuses an unknown name, another shape, and a meta tensor if no values are given.
    """
    owner, _, name = tensor_name.rpartition(".")
    module = module.get_submodule(owner) if owner else module
    old: Tensor | None = {**getattr(module, BUFFERS), **getattr(module, PARAMETERS)}.get(name)
    if old is None:
        raise ValueError(
            f"{type(module).__name__} has no parameter or buffer {name!r}: see named_parameters()"
        )
    place = device_of(device)
    if value is not None and value.shape != old.shape and not is_quantized(old):
        raise ValueError(
            f"{tensor_name}: value= has the shape {tuple(value.shape)}, the tensor {tuple(old.shape)}: give "
            "values for the same model"
        )
    if value is None and old.is_meta and place.type != "meta":
        raise ValueError(f"{tensor_name} has no values on the meta device: give value=... to put on {device}")
    if value is None and old.device == place:
        return
    source = old if value is None else value
    copies = None
    if tied_params_map is not None and not source.is_meta and place.type != "meta":
        copies = tied_params_map.get(source.data_ptr())
    new = None if copies is None else copies.get(place)
    if new is None:
        new = source.detach()
        if value is not None and (new.is_floating_point() or new.is_complex()):
            new = new.to(dtype_of(dtype) or old.dtype)
        new = _wrap_like(old, new.to(place, non_blocking=non_blocking), fp16_statistics)
        if copies is not None:
            copies[new.device] = new
    put_tensor(module, name, new)


def _wrap_like(old: Tensor, new: Tensor, statistics: Tensor | None) -> Tensor:
    """Return the new tensor in the old tensor's form: a parameter of the same class and attributes, or a buffer."""
    if not isinstance(old, nn.Parameter):
        return new
    kind, attributes = type(old), dict(vars(old))
    if statistics is not None:
        attributes["SCB"] = statistics.to(new.device)
    if isinstance(new, kind) and kind is not nn.Parameter:
        return new
    trains = old.requires_grad and (new.is_floating_point() or new.is_complex())
    if kind is nn.Parameter or not attributes:
        return kind(new, requires_grad=trains)
    attributes.pop("requires_grad", None)
    made: Any = kind
    return made(new, requires_grad=trains, **attributes)


def put_tensor(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Put a tensor in the place of a module's own parameter or buffer."""
    held: dict[str, Any] = getattr(module, PARAMETERS)
    (held if name in held else getattr(module, BUFFERS))[name] = tensor


def id_tensor_storage(tensor: Tensor) -> tuple[torch.device, int, int]:
    """Return the identity of a tensor's memory: its device, address and size in bytes."""
    storage = tensor.untyped_storage()
    return tensor.device, storage.data_ptr(), storage.nbytes()


def check_device_same(first_device: torch.device, second_device: torch.device) -> bool:
    """Return whether two names mean the same device; "cuda" means "cuda:0"."""
    if first_device.type != second_device.type:
        return False
    return first_device.type == "cpu" or (first_device.index or 0) == (second_device.index or 0)


def is_peft_model(model: nn.Module) -> bool:
    """Return whether a model is a peft model, also if it is compiled or in a wrapper."""
    inner = unwrap_compiled(getattr(model, "module", model))
    return any(
        kind.__module__.partition(".")[0] == "peft" and kind.__name__ == "PeftModel"
        for kind in type(inner).__mro__
    )


def find_tied_parameters(model: nn.Module, **kwargs: Any) -> list[list[str]]:
    """Return a list of names for each parameter that has several names."""
    return find_groups(model)


def retie_parameters(model: nn.Module, tied_params: Sequence[Sequence[str]]) -> None:
    """Make the names in each group refer to one parameter or buffer again: the first that has values.

    A TiedParametersError refuses unknown names and different shapes in a group; the model is then unchanged.
    """
    named = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    kept: list[Tensor | None] = []
    for group in tied_params:
        if missing := [name for name in group if name not in named]:
            raise TiedParametersError(f"tied_params: the model has no parameter {', '.join(missing)}")
        if len({named[name].shape for name in group}) > 1:
            shapes = ", ".join(f"{name} {tuple(named[name].shape)}" for name in group)
            raise TiedParametersError(
                f"tied_params: {shapes}: only tensors of the same shape can be tied; leave the others out"
            )
        kept.append(next((named[name] for name in group if not named[name].is_meta), None))
    groups = zip(tied_params, kept, strict=True)
    apply_assignments(model, [Assignment(tuple(group), each) for group, each in groups if each is not None])


def check_tied_parameters_in_config(model: nn.Module) -> bool:
    """Return whether the configuration of a model of transformers says that its embeddings are tied."""
    config: Any = getattr(model, "config", None)
    has_tied = getattr(model, "all_tied_weights_keys", None) or tied_weights_keys(model)
    getter: Any = getattr(config, "get_text_config", None)
    said: Any = config if getter is None else getter(decoder=True)
    ties = any(getattr(each, "tie_word_embeddings", False) for each in (config, said) if each is not None)
    embeds: Any = getattr(model, "get_output_embeddings", None)
    output = embeds() if callable(embeds) else None
    return bool((ties and output is not None) or (has_tied and ties))


def check_tied_parameters_on_same_device(
    tied_params: Sequence[Sequence[str]], device_map: Mapping[str, Any]
) -> None:
    """Warn of tied weights whose names a device map assigns to different devices."""
    for group in tied_params:
        devices = {
            name: device_map[nearest]
            for name in group
            if (nearest := nearest_entry(name, device_map)) is not None
        }
        if len(set(devices.values())) > 1:
            _LOGGER.warning(
                "device_map gives the names of one weight to several devices: %s. Give them to one, or plan the map.",
                devices,
            )
