"""Find a batch size that fits in memory by trying smaller and smaller ones."""

import functools
import inspect
import logging
import traceback
from collections.abc import Callable, Mapping
from typing import Concatenate, ParamSpec, TypeVar, overload

from drivetrain_memory.errors import NoBatchSizeFitsError
from drivetrain_memory.freeing.release import free_memory
from drivetrain_memory.out_of_memory import is_out_of_memory

logger = logging.getLogger(__name__)

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


@overload
def find_executable_batch_size(
    function: Callable[Concatenate[int, Arguments], Result],
    *,
    starting_batch_size: int = ...,
    reduce_batch_size: Callable[[int], int] = ...,
) -> Callable[Arguments, Result]: ...


@overload
def find_executable_batch_size(
    function: None = None,
    *,
    starting_batch_size: int = ...,
    reduce_batch_size: Callable[[int], int] = ...,
) -> Callable[[Callable[Concatenate[int, Arguments], Result]], Callable[Arguments, Result]]: ...


def find_executable_batch_size(
    function: Callable[Concatenate[int, Arguments], Result] | None = None,
    *,
    starting_batch_size: int = 128,
    reduce_batch_size: Callable[[int], int] = lambda batch_size: batch_size // 2,
) -> (
    Callable[Arguments, Result]
    | Callable[[Callable[Concatenate[int, Arguments], Result]], Callable[Arguments, Result]]
):
    """Call a function with smaller and smaller batch sizes until it no longer runs out of memory.

    A decorator, with or without arguments. The function takes the batch size as its first argument; callers omit it.
    Each try runs the function from the start, so it must create its model, optimizer and loaders itself. Every call
    starts again at `starting_batch_size`.

    Args:
        function: The function to call; its first argument is the batch size.
        starting_batch_size: The first batch size to try.
        reduce_batch_size: A function that returns the next batch size after one that does not fit; a size below 1
            ends the search.

    Raises:
        TypeError: The function has no argument for the batch size, or is a coroutine or generator function; at a
            call, the arguments do not fit the function.
        ValueError: `starting_batch_size` is below 1; at a call, `reduce_batch_size` did not return a smaller size.
        NoBatchSizeFitsError: At a call, every batch size ran out of memory.
    """
    if starting_batch_size < 1:
        raise ValueError(f"starting_batch_size={starting_batch_size!r}: must be at least 1")
    if function is None:
        return lambda decorated: _searching(decorated, starting_batch_size, reduce_batch_size)
    return _searching(function, starting_batch_size, reduce_batch_size)


def _searching(
    function: Callable[Concatenate[int, Arguments], Result], start: int, reduce: Callable[[int], int]
) -> Callable[Arguments, Result]:
    signature = inspect.signature(function)
    shown = _signature_of_callers(function, signature)

    @functools.wraps(function)
    def search(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        _check_arguments(function, shown, args, kwargs)
        tried: list[str] = []
        batch_size = start
        while batch_size >= 1:
            try:
                return function(batch_size, *args, **kwargs)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                tried.append(f"{batch_size} ({_told(error)})")
                # The locals of the traceback's frames keep the tensors of the failed try alive.
                traceback.clear_frames(error.__traceback__)
            free_memory()
            batch_size = _next_batch_size(function, batch_size, reduce, tried)
        raise NoBatchSizeFitsError(
            f"{function.__qualname__} ran out of memory at every batch size: {'; '.join(tried)}. Make the model or "
            "its inputs smaller, or free what else takes memory"
        )

    search.__signature__ = shown  # pyright: ignore[reportAttributeAccessIssue] - inspect reads this attribute
    return search


def _next_batch_size(
    function: Callable[..., object], batch_size: int, reduce: Callable[[int], int], tried: list[str]
) -> int:
    smaller = reduce(batch_size)
    if smaller >= batch_size:
        raise ValueError(f"reduce_batch_size({batch_size}) gave {smaller}: it must give a smaller batch size")
    logger.warning(
        "%s ran out of memory at batch size %s; %s",
        function.__qualname__,
        tried[-1],
        f"trying {smaller}" if smaller >= 1 else "there is none smaller to try",
    )
    return smaller


def _signature_of_callers(function: Callable[..., object], signature: inspect.Signature) -> inspect.Signature:
    """Return the function's signature without its first argument, the batch size."""
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        raise TypeError(
            f"{function.__qualname__} does its work after its call returned, where running out of memory is "
            "not seen: decorate a plain function"
        )
    parameters = list(signature.parameters.values())
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if not parameters or parameters[0].kind not in positional:
        raise TypeError(
            f"{function.__qualname__}{signature} takes no batch size: its first argument must be the batch size, as "
            f"in def {function.__name__}(batch_size, ...)"
        )
    return signature.replace(parameters=parameters[1:])


def _check_arguments(
    function: Callable[..., object],
    shown: inspect.Signature,
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
) -> None:
    """Check a call's arguments before the first try; the usual mistake is to pass the batch size."""
    try:
        shown.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(
            f"{function.__qualname__}{shown}: {error}. The batch size is passed for you: call it without"
        ) from None


def _told(error: BaseException) -> str:
    """Return an error's type and the first line of its message, at most 200 characters."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
