"""Apply functions to the tensors in nested lists, tuples, mappings and dataclasses, and move them to a device."""

from collections import UserDict
from collections.abc import Callable, Container, Iterable, Mapping
from copy import copy
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, cast

import torch

from drivetrain_accelerate.strictness import is_strict


@dataclass
class TensorInformation:
    """The shape and dtype of a tensor, without its values."""

    shape: torch.Size
    dtype: torch.dtype


def is_torch_tensor(tensor: Any) -> bool:
    """Return whether this is a tensor."""
    return isinstance(tensor, torch.Tensor)


def is_torch_xpu_tensor(tensor: Any) -> bool:
    """Return whether this is a tensor on an Intel GPU."""
    return isinstance(tensor, torch.Tensor) and tensor.device.type == "xpu"


def is_tensor_information(tensor_info: Any) -> bool:
    """Return whether this is a `TensorInformation`."""
    return isinstance(tensor_info, TensorInformation)


def is_namedtuple(data: Any) -> bool:
    """Return whether this is an instance of a named tuple's class."""
    return isinstance(data, tuple) and hasattr(data, "_asdict") and hasattr(data, "_make")


def honor_type(obj: Any, generator: Iterable[Any]) -> Any:
    """Return the items as a list, tuple or named tuple of the same class as `obj`."""
    kind = cast("Any", type(obj))
    return kind(*generator) if is_namedtuple(obj) else kind(generator)


def recursively_apply(
    func: Callable[..., Any],
    data: Any,
    *args: Any,
    test_type: Callable[[Any], bool] = is_torch_tensor,
    error_on_other_type: bool = False,
    **kwargs: Any,
) -> Any:
    """Return nested data with a function applied to its leaves; the classes of containers are kept."""

    def again(value: Any) -> Any:
        return recursively_apply(
            func, value, *args, test_type=test_type, error_on_other_type=error_on_other_type, **kwargs
        )

    if isinstance(data, (tuple, list, Mapping)):
        return _with_items(data, again)
    if test_type(data):
        return func(data, *args, **kwargs)
    if is_dataclass(data) and not isinstance(data, type):
        return with_fields(data, {each.name: again(getattr(data, each.name)) for each in fields(data)})
    if error_on_other_type:
        name = getattr(func, "__name__", type(func).__name__)
        raise TypeError(
            f"{name} got a leaf of {type(data)}: it takes nested lists, tuples, dicts and dataclasses whose leaves "
            f"all fulfil `{getattr(test_type, '__name__', test_type)}`"
        )
    return data


def _with_items(data: Any, again: Callable[[Any], Any], skipped: Container[Any] = ()) -> Any:
    """Return a list, tuple or mapping with a function applied to its items, but for those of the skipped keys."""
    if not isinstance(data, Mapping):
        return honor_type(data, map(again, data))
    mapping = cast("Mapping[Any, Any]", data)
    return with_values(
        mapping, {key: value if key in skipped else again(value) for key, value in mapping.items()}
    )


def with_values(data: Mapping[Any, Any], values: dict[Any, Any]) -> Mapping[Any, Any]:
    """Return a mapping of the same class with other values for its keys."""
    if type(data) is dict:
        return values
    if not isinstance(data, (dict, UserDict)):
        return cast("Any", type(data))(values)
    filled = copy(data)  # keeps what is no item: a default factory, the encodings of a tokenizer
    for key, value in values.items():
        filled[key] = value
    return cast("Mapping[Any, Any]", filled)


def with_fields(data: Any, values: Mapping[str, Any]) -> Any:
    """Return a dataclass with other values in its fields; the same one if none differs."""
    if all(getattr(data, name) is value for name, value in values.items()):
        return data
    filled = copy(data)
    for name, value in values.items():
        object.__setattr__(filled, name, value)  # frozen ones refuse setattr
    return filled


def send_to_device(
    tensor: Any,
    device: torch.device | str | int,
    non_blocking: bool = False,
    skip_keys: str | Iterable[str] | None = None,
) -> Any:
    """Return nested data with its tensors, and whatever else has a method `to`, on a device."""
    skipped = (skip_keys,) if isinstance(skip_keys, str) else tuple(skip_keys or ())

    def again(value: Any) -> Any:
        return send_to_device(value, device, non_blocking, skipped)

    can_move = not isinstance(tensor, type) and hasattr(tensor, "to")
    if can_move and not (skipped and isinstance(tensor, Mapping)):
        moves: Any = tensor
        try:
            return moves.to(device, non_blocking=non_blocking)
        except TypeError:  # the `to` of a class of the program's own takes the device alone
            return moves.to(device)
    if isinstance(tensor, (tuple, list, Mapping)):
        return _with_items(tensor, again, skipped)
    if is_dataclass(tensor) and not isinstance(tensor, type) and is_strict():
        values = {each.name: getattr(tensor, each.name) for each in fields(tensor)}
        sent = {name: value if name in skipped else again(value) for name, value in values.items()}
        return with_fields(tensor, sent)
    return tensor


def find_device(data: Any) -> torch.device | None:
    """Return the device of the first tensor; None if there is none."""
    return next((tensor.device for tensor in list_tensors(data)), None)


def list_tensors(data: Any) -> list[torch.Tensor]:
    """Return the tensors of nested data, in order."""
    found: list[torch.Tensor] = []

    def noted(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    recursively_apply(noted, data)
    return found
