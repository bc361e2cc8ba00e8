"""Move, slice, join and convert the tensors in nested lists, tuples, mappings and dataclasses."""

from collections import UserDict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, fields, is_dataclass
from functools import update_wrapper, wraps
from pickle import PicklingError
from typing import Any, NoReturn, cast

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
    """Apply a function to the leaves of nested data; keep the classes of the containers."""

    def again(value: Any) -> Any:
        return recursively_apply(
            func, value, *args, test_type=test_type, error_on_other_type=error_on_other_type, **kwargs
        )

    if isinstance(data, (tuple, list, Mapping)):
        return _map_items(data, again)
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


def _map_items(data: Any, again: Callable[[Any], Any], skipped: Container[Any] = ()) -> Any:
    """Apply a function to the items of a list, tuple or mapping, without the keys in `skipped`."""
    if not isinstance(data, Mapping):
        return honor_type(data, map(again, data))
    mapping = cast("Mapping[Any, Any]", data)
    return with_values(
        mapping, {key: value if key in skipped else again(value) for key, value in mapping.items()}
    )


def with_values(data: Mapping[Any, Any], values: dict[Any, Any]) -> Mapping[Any, Any]:
    """Return a mapping of the same class and keys with new values."""
    if type(data) is dict:
        return values
    if not isinstance(data, (dict, UserDict)):
        return cast("Any", type(data))(values)
    filled = copy(data)  # keeps what is no item: a default factory, the encodings of a tokenizer
    for key, value in values.items():
        filled[key] = value
    return cast("Mapping[Any, Any]", filled)


def with_fields(data: Any, values: Mapping[str, Any]) -> Any:
    """Return a dataclass with new values in its fields; the same object if no value differs."""
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
    """Return nested data with its tensors, and other objects that have a method `to`, on a device."""
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
        return _map_items(tensor, again, skipped)
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


def find_batch_size(data: Any) -> int:
    """Return the size of the first dimension of the first leaf, which must be a tensor."""
    if isinstance(data, (tuple, list, Mapping)):
        items = cast("Mapping[Any, Any]", data).values() if isinstance(data, Mapping) else data
        for first in cast("Sequence[Any]", items):
            return find_batch_size(first)
        raise ValueError(f"an empty {type(data).__name__} has no batch size: give it a tensor")
    if not isinstance(data, torch.Tensor):
        raise TypeError(f"{type(data)} has no batch size: the first leaf must be a tensor")
    if data.dim() == 0:
        raise ValueError("a tensor of shape () has no batch size: the first leaf needs a dimension")
    return data.shape[0]


def ignorant_find_batch_size(data: Any) -> int | None:
    """Return the size of the first dimension of the first leaf; None if the leaf has no dimension."""
    try:
        return find_batch_size(data)
    except (ValueError, TypeError):
        return None


def get_data_structure(data: Any) -> Any:
    """Return nested data with a `TensorInformation` in place of each tensor."""

    def information(tensor: torch.Tensor) -> TensorInformation:
        return TensorInformation(tensor.shape, tensor.dtype)

    return recursively_apply(information, data)


def get_shape(data: Any) -> Any:
    """Return nested data with the shape of each tensor, as a list, in its place."""

    def shape(tensor: torch.Tensor) -> list[int]:
        return list(tensor.shape)

    return recursively_apply(shape, data)


def initialize_tensors(data_structure: Any) -> Any:
    """Return nested data with an uninitialised tensor in place of each `TensorInformation`."""

    def empty(information: TensorInformation) -> torch.Tensor:
        return torch.empty(information.shape, dtype=information.dtype)

    return recursively_apply(empty, data_structure, test_type=is_tensor_information)


def listify(data: Any) -> Any:
    """Return nested data with a list of numbers in place of each tensor."""
    return recursively_apply(torch.Tensor.tolist, data)


def slice_tensors(
    data: Any, tensor_slice: Any, process_index: int | None = None, num_processes: int | None = None
) -> Any:
    """Return nested data with a slice of each tensor."""
    return recursively_apply(torch.Tensor.__getitem__, data, tensor_slice)


def concatenate(data: Sequence[Any], dim: int = 0) -> Any:
    """Join nested tensors of the same structure, leaf by leaf."""
    if not data:
        raise ValueError("there is nothing to concatenate: the list is empty")
    first = data[0]
    if isinstance(first, (tuple, list)):
        if len({len(each) for each in data}) > 1:
            raise ValueError(f"cannot concatenate sequences of lengths {[len(each) for each in data]}")
        columns = zip(*data, strict=True)
        return honor_type(first, (concatenate(column, dim=dim) for column in columns))
    if isinstance(first, Mapping):
        mapping = cast("Mapping[Any, Any]", first)
        if any(each.keys() != mapping.keys() for each in data):
            raise ValueError(
                f"cannot concatenate mappings of different keys: {[list(each) for each in data]}"
            )
        return with_values(
            mapping, {key: concatenate([each[key] for each in data], dim=dim) for key in mapping}
        )
    if not isinstance(first, torch.Tensor):
        if len(data) == 1:
            return first
        raise TypeError(f"cannot concatenate {type(first)}: all leaves must be tensors")
    return torch.cat(list(data), dim=dim)


def pad_input_tensors(tensor: Any, batch_size: int, num_processes: int, dim: int = 0) -> Any:
    """Repeat the last row of nested tensors until the number of processes divides the batch size."""
    missing = -batch_size % num_processes

    def padded(leaf: torch.Tensor) -> torch.Tensor:
        if missing == 0:
            return leaf
        last = leaf.narrow(dim, leaf.shape[dim] - 1, 1)
        return torch.cat([leaf, *[last] * missing], dim=dim)

    return recursively_apply(padded, tensor, error_on_other_type=True)


def convert_to_fp32(tensor: Any) -> Any:
    """Return nested data with its float16 and bfloat16 tensors in float32."""

    def is_half(leaf: Any) -> bool:
        return isinstance(leaf, torch.Tensor) and leaf.dtype in (torch.float16, torch.bfloat16)

    return recursively_apply(torch.Tensor.float, tensor, test_type=is_half)


class ConvertOutputsToFp32:
    """A callable that calls another and converts the results to float32."""

    def __init__(self, model_forward: Callable[..., Any]) -> None:
        self.model_forward = model_forward
        update_wrapper(self, model_forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the callable."""
        return convert_to_fp32(self.model_forward(*args, **kwargs))

    def __getstate__(self) -> NoReturn:
        raise PicklingError(
            "a forward that converts its outputs to float32 cannot be pickled: unwrap the model first, by "
            "Accelerator.unwrap_model(model, keep_fp32_wrapper=False)"
        )


def convert_outputs_to_fp32(model_forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls another and converts the results to float32."""
    converting = ConvertOutputsToFp32(model_forward)

    def forward(*args: Any, **kwargs: Any) -> Any:
        return converting(*args, **kwargs)

    return wraps(converting)(forward)
