"""Free memory, and find a batch size that fits. Accelerate's rule chooses the next smaller size."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from drivetrain_memory import ExecutableBatchSize, NoBatchSizeFitsError, free_memory, is_out_of_memory
from drivetrain_memory import clear_device_cache as clear_device_cache
from drivetrain_memory import find_executable_batch_size as search
from drivetrain_memory.batch_size.search import SizedFunction

# cuDNN says so where it finds no algorithm for which the memory suffices.
_CUDNN = "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED."


def release_memory(*objects: Any) -> list[None]:
    """Forget objects, collect garbage and return cached memory; return a None for each object.

    Call `model, optimizer = release_memory(model, optimizer)`. Objects with other references stay in memory.
    """
    count = len(objects)
    del objects
    free_memory()
    return [None] * count


def should_reduce_batch_size(exception: Exception) -> bool:
    """Return whether an exception means that the host or an accelerator ran out of memory."""
    return is_out_of_memory(exception) or (isinstance(exception, RuntimeError) and _CUDNN in str(exception))


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
) -> Any:
    """Call a function with smaller and smaller batch sizes until it no longer runs out of memory.

    A decorator, with or without arguments. A second call of the decorated function starts at the size that fitted.

    Raises:
        TypeError: The function takes no batch size; at a call, the arguments do not fit it.
        ValueError: The starting size is below 1; at a call, the next size is not smaller.
        NoBatchSizeFitsError: At a call, every size ran out of memory; a RuntimeError.
    """
    if function is None:
        return partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
        )
    remembered = ExecutableBatchSize()  # also by the calls of other objects, where the function is a method

    def searching(sized: Callable[..., Any]) -> Callable[..., Any]:
        tried = search(
            _translated_errors()(sized),
            starting_batch_size=starting_batch_size,
            reduce_batch_size=lambda size: (
                reduce_batch_size_fn() if reduce_batch_size_fn else int(size * 0.9)
            ),
            remembered=remembered,
        )

        def decorator(*args: Any, **kwargs: Any) -> Any:
            try:
                return tried(*args, **kwargs)
            except NoBatchSizeFitsError as error:
                raise NoBatchSizeFitsError(f"no batch size fits, down to the smallest: {error}") from error

        return decorator

    return SizedFunction(function, searching)


@contextmanager
def _translated_errors() -> Generator[None]:
    """Run the block: if cuDNN finds no algorithm because memory is short, raise an OutOfMemoryError."""
    try:
        yield
    except RuntimeError as error:
        if _CUDNN in str(error) and not is_out_of_memory(error):
            raise torch.OutOfMemoryError(str(error)) from error
        raise
