"""Look at nested tensors: their batch size and structure; cut, join and convert them."""

from collections.abc import Callable, Mapping, Sequence
from functools import update_wrapper, wraps
from pickle import PicklingError
from typing import Any, NoReturn, cast

import torch

from drivetrain_accelerate.tensors.nested_tensors import (
    TensorInformation,
    honor_type,
    is_tensor_information,
    recursively_apply,
    with_values,
)


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
    """Return the size of the first dimension of the first leaf; None if it has none."""
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
    """Return nested data with a tensor of any values in place of each `TensorInformation`."""

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
    del process_index, num_processes
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
    """Return nested tensors whose last row is repeated until the batch divides by the number of processes."""
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
    """A callable that calls another, and converts what it returns to float32."""

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
    """Return a function that calls another, and converts what it returns to float32."""
    converting = ConvertOutputsToFp32(model_forward)

    def forward(*args: Any, **kwargs: Any) -> Any:
        return converting(*args, **kwargs)

    return wraps(converting)(forward)
