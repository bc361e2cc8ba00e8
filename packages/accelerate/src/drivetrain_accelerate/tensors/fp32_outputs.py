"""Convert what a model returns in half precision to float32."""

from collections.abc import Callable
from functools import update_wrapper, wraps
from typing import Any, NoReturn

import torch

from drivetrain_accelerate.tensors.nested_tensors import recursively_apply


def convert_to_fp32(tensor: Any) -> Any:
    """Return nested data with its float16 and bfloat16 tensors in float32."""
    return recursively_apply(torch.Tensor.float, tensor, test_type=_is_half)


def _is_half(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dtype in (torch.float16, torch.bfloat16)


class ConvertOutputsToFp32:
    """A callable that calls another, and converts what it returns to float32.

    Args:
        model_forward: The callable to wrap.
    """

    def __init__(self, model_forward: Callable[..., Any]) -> None:
        self.model_forward = model_forward
        update_wrapper(self, model_forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the callable."""
        return convert_to_fp32(self.model_forward(*args, **kwargs))

    def __getstate__(self) -> NoReturn:
        from pickle import PicklingError

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
