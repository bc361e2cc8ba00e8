"""Find a batch size that fits in memory by trying smaller and smaller ones."""

import functools
import inspect
import logging
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Concatenate, ParamSpec, TypeAlias, TypeVar, overload

from drivetrain_memory.batch_size.executable import ExecutableBatchSize, TryOutcome
from drivetrain_memory.batch_size.host_limit import available_host_bytes, limit_host_memory
from drivetrain_memory.errors import NoBatchSizeFitsError
from drivetrain_memory.freeing.release import free_memory
from drivetrain_memory.out_of_memory import is_out_of_memory

logger = logging.getLogger(__name__)

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Agree: TypeAlias = Callable[[TryOutcome], TryOutcome]


@overload
def find_executable_batch_size(
    function: Callable[Concatenate[int, Arguments], Result],
    *,
    starting_batch_size: int = ...,
    reduce_batch_size: Callable[[int], int] = ...,
    agree: Agree | None = ...,
    remembered: ExecutableBatchSize | None = ...,
    limit_host: bool = ...,
) -> Callable[Arguments, Result]: ...


@overload
def find_executable_batch_size(
    function: None = None,
    *,
    starting_batch_size: int = ...,
    reduce_batch_size: Callable[[int], int] = ...,
    agree: Agree | None = ...,
    remembered: ExecutableBatchSize | None = ...,
    limit_host: bool = ...,
) -> Callable[[Callable[Concatenate[int, Arguments], Result]], Callable[Arguments, Result]]: ...


def find_executable_batch_size(
    function: Callable[Concatenate[int, Arguments], Result] | None = None,
    *,
    starting_batch_size: int = 128,
    reduce_batch_size: Callable[[int], int] = lambda batch_size: batch_size // 2,
    agree: Agree | None = None,
    remembered: ExecutableBatchSize | None = None,
    limit_host: bool = True,
) -> (
    Callable[Arguments, Result]
    | Callable[[Callable[Concatenate[int, Arguments], Result]], Callable[Arguments, Result]]
):
    """Call a function with smaller and smaller batch sizes until it no longer runs out of memory.

    A decorator, with or without arguments. The function takes the batch size as its first argument; callers omit it.
    Each try runs the function from the start, so it must create its model, optimizer and loaders itself. Every call
    starts again at `starting_batch_size`, or at a size that is `remembered`.

    Args:
        function: The function to call; its first argument is the batch size.
        starting_batch_size: The first batch size to try.
        reduce_batch_size: A function that returns the next batch size after one that does not fit; a size below 1
            ends the search.
        agree: A function that is called on every rank after each try, with the outcome on this rank, and returns the
            outcome on all: out of memory if one rank was. None for a single process. A rank that fails because
            another ran out of memory is told so by it; `Accelerator.find_executable_batch_size` brings one.
        remembered: An answer to begin with. Each try writes its size to it before it begins, so that a checkpoint
            that is saved in the try holds it.
        limit_host: Whether host allocations beyond the limit of the job's control group raise MemoryError in a try.

    Raises:
        TypeError: The function has no argument for the batch size, or is a coroutine or generator function; at a
            call, the arguments do not fit the function.
        ValueError: `starting_batch_size` is below 1; at a call, `reduce_batch_size` did not return a smaller size.
        NoBatchSizeFitsError: At a call, every batch size ran out of memory.
    """
    if starting_batch_size < 1:
        raise ValueError(f"starting_batch_size={starting_batch_size!r}: must be at least 1")
    search = _Search(
        start=starting_batch_size,
        reduce=reduce_batch_size,
        agree=agree or (lambda outcome: outcome),
        remembered=remembered,
        limit_host=limit_host,
    )
    if function is None:
        return lambda decorated: _searching(decorated, search)
    return _searching(function, search)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Search:
    """The arguments of a search."""

    start: int
    reduce: Callable[[int], int]
    agree: Agree
    remembered: ExecutableBatchSize | None
    limit_host: bool


def _searching(
    function: Callable[Concatenate[int, Arguments], Result], search: _Search
) -> Callable[Arguments, Result]:
    signature = inspect.signature(function)
    shown = _signature_of_callers(function, signature)

    @functools.wraps(function)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        _check_arguments(function, shown, args, kwargs)
        tried: list[str] = []
        remembered = search.remembered or ExecutableBatchSize()
        batch_size = min(search.start, remembered.batch_size or search.start)
        while batch_size >= 1:
            remembered.batch_size = batch_size  # before the try: a checkpoint that it saves holds this size
            result, failure = _try(
                lambda size=batch_size: function(size, *args, **kwargs), search, tried, batch_size
            )
            if failure is not None:
                raise failure
            if result:
                return result[0]
            free_memory()
            remembered.batch_size = None
            batch_size = _next_batch_size(function, batch_size, search.reduce, tried)
        raise NoBatchSizeFitsError(
            f"{function.__qualname__} ran out of memory at every batch size: {'; '.join(tried)}. Make the model or "
            "its inputs smaller, or free what else takes memory"
        )

    run.__signature__ = shown  # pyright: ignore[reportAttributeAccessIssue] - inspect reads this attribute
    return run


def _try(
    call: Callable[[], Result], search: _Search, tried: list[str], batch_size: int
) -> tuple[list[Result], Exception | None]:
    """Try one batch size: return its result, or the error to raise; neither if it does not fit on all ranks."""
    results: list[Result] = []
    failure: Exception | None = None
    told = "it ran out of memory on another rank"
    outcome = TryOutcome.FITS
    try:
        with limit_host_memory(available_host_bytes() if search.limit_host else None):
            results.append(call())
    except Exception as error:  # noqa: BLE001 - raised by the caller, after all ranks have been told
        failure, outcome = error, TryOutcome.FAILED
        if is_out_of_memory(error):
            outcome, told = TryOutcome.OUT_OF_MEMORY, _told(error)
    if outcome is TryOutcome.OUT_OF_MEMORY and failure is not None:
        # The locals of the traceback's frames keep the tensors of the failed try alive.
        traceback.clear_frames(failure.__traceback__)
        failure = None
    if search.agree(outcome) is not TryOutcome.OUT_OF_MEMORY:
        return results, failure
    if failure is not None:
        traceback.clear_frames(failure.__traceback__)
    tried.append(f"{batch_size} ({told})")
    return [], None


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
