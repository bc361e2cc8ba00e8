"""Find a batch size that fits in memory by trying smaller and smaller ones."""

import functools
import inspect
import logging
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import partial
from types import MethodType
from typing import Any, Concatenate, Generic, ParamSpec, SupportsIndex, TypeAlias, TypeVar, overload

from drivetrain_memory.batch_size.host_limit import available_host_bytes, limit_host_memory
from drivetrain_memory.errors import NoBatchSizeFitsError
from drivetrain_memory.freeing.release import free_memory
from drivetrain_memory.out_of_memory import is_out_of_memory

logger = logging.getLogger(__name__)

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class TryOutcome(Enum):
    """The outcome of a try with one batch size, on one rank or on all of them."""

    FITS = "fits"
    OUT_OF_MEMORY = "out of memory"
    FAILED = "failed"


@dataclass(slots=True)
class ExecutableBatchSize:
    """The result of a search, to save with a run: a later search begins with it.

    The batch size is that of a micro-batch on one rank in the current try, or in the last one that fitted; None
    before the first try, and after a try that did not fit.
    """

    batch_size: int | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return the batch size as a dict to save."""
        return {"batch_size": self.batch_size}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the batch size from a saved dict."""
        self.batch_size = state_dict["batch_size"]


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

    A decorator, with or without arguments. The function takes the batch size as its first argument, or a method after
    its object; callers omit it. Each try runs the function from the start, so it must create its model, optimizer and
    loaders itself. Every call starts again at `starting_batch_size`, or at a size that is `remembered`.

    Args:
        function: The function to call; its first argument is the batch size.
        starting_batch_size: The first batch size to try.
        reduce_batch_size: A function from a batch size that does not fit to the next one; a size below 1 ends the
            search.
        agree: A function, called on every rank after each try, from a rank's outcome to that of all: out of memory if
            any ran out. None for a single process. `Accelerator.find_executable_batch_size` passes one.
        remembered: The size to begin with. Each try first writes its batch size here, for checkpoints of that try.
        limit_host: Whether host allocations beyond the limit of the job's control group raise MemoryError in a try.

    Raises:
        TypeError: The function has no argument for the batch size, or is a coroutine or generator function; at a
            call, the arguments do not fit the function.
        ValueError: `starting_batch_size` is no integer above 0; at a call, `reduce_batch_size` gave no smaller size.
        NoBatchSizeFitsError: At a call, every batch size ran out of memory.

    Example:
        >>> @find_executable_batch_size(starting_batch_size=64)
        ... def train(batch_size):
        ...     if batch_size > 16:
        ...         raise MemoryError
        ...     return batch_size
        >>> train()
        16
    """
    if not isinstance(starting_batch_size, SupportsIndex) or starting_batch_size < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"starting_batch_size={starting_batch_size!r}: must be an integer, at least 1")
    search = _Search(
        start=starting_batch_size,
        reduce=reduce_batch_size,
        agree=agree or (lambda outcome: outcome),
        remembered=remembered,
        limit_host=limit_host,
    )
    if function is None:
        return lambda decorated: SizedFunction(decorated, partial(_searching, search=search))
    return SizedFunction(function, partial(_searching, search=search))


class SizedFunction(Generic[Arguments, Result]):
    """A decorated function that gets the batch size from a search as its first argument, in a method after `self`.

    This object replaces the function. In a class it works above or below `classmethod` and `staticmethod`.
    """

    def __init__(
        self, function: Callable[..., Result], searching: Callable[[Any], Callable[..., Result]]
    ) -> None:
        functools.update_wrapper(self, function)
        self._function: Any = function
        self._searching = searching
        if callable(function):  # a class method is not, and is looked at when it is called
            self.__signature__ = signature_of_callers(function)
        self._method = self._bind_method()

    def __call__(self, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        """Run the search; the arguments are those of the function without the batch size."""
        owner: Any = args[0] if args else None
        # Python 3.13 calls this as the class method of a class without binding it.
        if isinstance(owner, type) and any(
            isinstance(one, classmethod) and one.__func__ is self
            for base in owner.__mro__
            for one in vars(base).values()
        ):
            return self._method(*args, **kwargs)
        return self._searching(self._function)(*args, **kwargs)

    def __get__(self, instance: object, owner: type[Any] | None = None) -> Any:
        """Return the search over the bound function: a method like any other, which can be pickled."""
        if isinstance(self._function, staticmethod) or not hasattr(self._function, "__get__"):
            return self
        first = owner if isinstance(self._function, classmethod) else instance
        return self._method if first is None else MethodType(self._method, first)

    def _bind_method(self) -> Callable[..., Result]:
        """Return the method for a class: a function with the object or class as the first argument."""

        def method(first: Any, /, *args: Any, **kwargs: Any) -> Result:
            place = (None, first) if isinstance(self._function, classmethod) else (first, type(first))
            return self._searching(self._function.__get__(*place))(*args, **kwargs)

        shown = inspect.signature(getattr(self._function, "__func__", self._function))
        parameters = list(shown.parameters.values())
        method.__signature__ = shown.replace(parameters=[*parameters[:1], *parameters[2:]])
        return functools.update_wrapper(method, self._function)

    def __reduce__(self) -> str:
        return _name_of(self)  # pickled by name, as a function is


@dataclass(frozen=True, slots=True, kw_only=True)
class _Search:
    """The arguments of a search."""

    start: int
    reduce: Callable[[int], int]
    agree: Agree
    remembered: ExecutableBatchSize | None
    limit_host: bool


def _searching(function: Callable[..., Result], search: _Search) -> Callable[..., Result]:
    """Return the search over a callable whose first argument is the batch size."""
    name, shown = _name_of(function), signature_of_callers(function)

    def run(*args: Any, **kwargs: Any) -> Result:
        try:
            shown.bind(*args, **kwargs)
        except TypeError as error:  # the usual mistake is to pass the batch size
            raise TypeError(
                f"{name}{shown}: {error}. The batch size is passed for you: call it without"
            ) from None
        tried: list[str] = []
        remembered = search.remembered or ExecutableBatchSize()
        batch_size = min(search.start, remembered.batch_size or search.start)
        while batch_size >= 1:
            remembered.batch_size = batch_size  # before the try: a checkpoint that it saves holds this size
            result, failure = _try(partial(function, batch_size, *args, **kwargs), search, tried, batch_size)
            if failure is not None:
                raise failure
            if result:
                return result[0]
            free_memory()
            remembered.batch_size = None
            smaller = search.reduce(batch_size)
            if smaller >= batch_size:
                raise ValueError(
                    f"reduce_batch_size({batch_size}) gave {smaller}: it must give a smaller batch size"
                )
            goes_on = f"trying {smaller}" if smaller >= 1 else "there is none smaller to try"
            logger.warning("%s ran out of memory at batch size %s; %s", name, tried[-1], goes_on)
            batch_size = smaller
        raise NoBatchSizeFitsError(
            f"{name} ran out of memory at every batch size: {'; '.join(tried)}. Make the model or "
            "its inputs smaller, or free what else takes memory"
        )

    return run


def _try(
    call: Callable[[], Result], search: _Search, tried: list[str], batch_size: int
) -> tuple[list[Result], Exception | None]:
    """Try one batch size; return its result, or the error to raise, or neither if a rank ran out of memory."""
    results: list[Result] = []
    failure: Exception | None = None
    reason, outcome = "it ran out of memory on another rank", TryOutcome.FITS
    try:
        with limit_host_memory(available_host_bytes() if search.limit_host else None):
            results.append(call())
    except Exception as error:  # noqa: BLE001 - raised by the caller, after all ranks have agreed
        if is_out_of_memory(error):
            first_lines = str(error).strip()[:200].splitlines()[:1]
            reason, outcome = ": ".join([type(error).__name__, *first_lines]), TryOutcome.OUT_OF_MEMORY
            # The locals of the traceback's frames keep the tensors of the failed try alive.
            traceback.clear_frames(error.__traceback__)
        else:
            failure, outcome = error, TryOutcome.FAILED
    if search.agree(outcome) is not TryOutcome.OUT_OF_MEMORY:
        return results, failure
    if failure is not None:
        traceback.clear_frames(failure.__traceback__)
    tried.append(f"{batch_size} ({reason})")
    return [], None


def signature_of_callers(function: Callable[..., object]) -> inspect.Signature:
    """Return the function's signature without its first argument, the batch size."""
    name, signature = _name_of(function), inspect.signature(function)
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        raise TypeError(
            f"{name} does its work after its call returned, where running out of memory is "
            "not seen: decorate a plain function"
        )
    parameters = list(signature.parameters.values())
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if not parameters or parameters[0].kind not in positional:
        raise TypeError(
            f"{name}{signature} takes no batch size: its first argument must be the batch size, as "
            f"in def {name.rpartition('.')[2]}(batch_size, ...)"
        )
    return signature.replace(parameters=parameters[1:])


def _name_of(function: Any) -> str:
    """Return the name of a function, of the function inside a partial, or of another callable's class."""
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__qualname__", type(function).__qualname__)


def accumulation_steps(starting_batch_size: int, batch_size: int, *, steps: int = 1) -> int:
    """Return the micro-batches of `batch_size` that make up one step of `steps` micro-batches of the starting size.

    The number is rounded up, so the global batch never shrinks. If the batch size does not divide it evenly, it grows
    by less than one micro-batch on each rank. ValueError if a number is below 1, or the batch size above the starting
    one.
    """
    if min(starting_batch_size, batch_size, steps) < 1 or batch_size > starting_batch_size:
        raise ValueError(
            f"batch_size={batch_size}, starting_batch_size={starting_batch_size}, steps={steps}: each must be at "
            "least 1, and the batch size at most the starting one"
        )
    return -(-starting_batch_size * steps // batch_size)
