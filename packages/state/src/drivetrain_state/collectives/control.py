"""Who runs what: functions for some ranks only, the main process first, and inputs divided among processes."""

from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, TextIO, TypeVar, cast

import torch

from drivetrain_state.collectives._nested import Nested
from drivetrain_state.collectives.operations import barrier
from drivetrain_state.context import Context

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Function = Callable[Arguments, Result]


def on_main_process(
    context: Context,
) -> Callable[[Function[Arguments, Result]], Function[Arguments, Result | None]]:
    """A decorator: the function runs on rank 0; elsewhere it does nothing and returns None."""
    return _only_if(context.topology.is_main)


def on_local_main_process(
    context: Context,
) -> Callable[[Function[Arguments, Result]], Function[Arguments, Result | None]]:
    """A decorator: the function runs on the first rank of each node; elsewhere it returns None."""
    return _only_if(context.topology.is_local_main)


def on_last_process(
    context: Context,
) -> Callable[[Function[Arguments, Result]], Function[Arguments, Result | None]]:
    """A decorator: the function runs on the last rank; elsewhere it returns None."""
    return _only_if(context.topology.is_last)


def on_process(
    context: Context, index: int
) -> Callable[[Function[Arguments, Result]], Function[Arguments, Result | None]]:
    """A decorator: the function runs on rank `index`; elsewhere it returns None.

    Raises:
        ValueError: If there is no such rank: the function would run nowhere.
    """
    if not 0 <= index < context.topology.world_size:
        raise ValueError(
            f"index={index} with world_size={context.topology.world_size}: name a rank that exists"
        )
    return _only_if(context.topology.rank == index)


def _only_if(chosen: bool) -> Callable[[Function[Arguments, Result]], Function[Arguments, Result | None]]:
    def decorate(function: Function[Arguments, Result]) -> Function[Arguments, Result | None]:
        @wraps(function)
        def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result | None:
            return function(*args, **kwargs) if chosen else None

        return run

    return decorate


def print_on_main(
    context: Context,
    *values: object,
    sep: str | None = " ",
    end: str | None = "\n",
    file: TextIO | None = None,
    flush: bool = True,
) -> None:
    """`print` on rank 0; nothing elsewhere. The line is out at once, unless `flush=False`."""
    if context.topology.is_main:
        print(*values, sep=sep, end=end, file=file, flush=flush)


@contextmanager
def main_process_first(context: Context) -> Generator[None]:
    """Rank 0 goes through the block first, then the others. Called on all ranks.

    For work that leaves a file which the others then find, such as a prepared data set. If rank 0 raises, the
    others are released all the same.
    """
    with _first(context, context.topology.is_main):
        yield


@contextmanager
def local_main_process_first(context: Context) -> Generator[None]:
    """The first rank of each node goes through the block first, then the others. Called on all ranks."""
    with _first(context, context.topology.is_local_main):
        yield


@contextmanager
def _first(context: Context, goes_first: bool) -> Generator[None]:
    if not goes_first:
        barrier(context)
    try:
        yield
    finally:
        if goes_first:
            barrier(context)


@contextmanager
def split_between_processes(
    context: Context, inputs: Nested, apply_padding: bool = False
) -> Generator[Nested]:
    """This rank's part of `inputs`, which every rank has whole; parts are contiguous and in rank order.

    Sizes differ by one at most, the first ranks have the longer ones; with fewer items than processes the last
    ranks get none. No communication.

    Args:
        context: This process among the others.
        inputs: A list, a tuple, another sequence that can be sliced, a `datasets.Dataset`, a tensor or
            NumPy array (divided along its first dimension), or a mapping of such of one length. Padding makes a list
            of another sequence.
        apply_padding: Whether short parts are filled up with the last item of `inputs`, so that all have the
            same length and can be gathered.

    Raises:
        ValueError: If `inputs` is of another type, the lengths in a mapping differ, or there is nothing to pad with.
    """
    yield part_of(inputs, context.topology.rank, context.topology.world_size, apply_padding=apply_padding)


def part_of(inputs: Nested, index: int, count: int, *, apply_padding: bool = False) -> Nested:
    """Part `index` of `count` of `inputs`, as `split_between_processes` divides them."""
    length = _length(inputs)
    if apply_padding and length == 0:
        raise ValueError("apply_padding=True with empty inputs: there is no last item to pad with")
    positions = part_positions(length, index, count, apply_padding=apply_padding)
    return _take(inputs, positions)


def part_positions(length: int, index: int, count: int, *, apply_padding: bool = False) -> Sequence[int]:
    """Which of `length` items belong to part `index` of `count`: positions in order, padding by the last one."""
    size, longer = divmod(length, count)
    start = index * size + min(index, longer)
    mine = range(start, start + size + (index < longer))
    if not apply_padding:
        return mine
    longest = size + (longer > 0)
    return [*mine, *[length - 1] * (longest - len(mine))]


def _length(inputs: Nested) -> int:
    if isinstance(inputs, Mapping):
        lengths = {key: _length(value) for key, value in cast("Mapping[Any, Any]", inputs).items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"inputs has values of different lengths, {lengths}: they must be equal")
        return next(iter(lengths.values()), 0)
    if isinstance(inputs, torch.Tensor) and inputs.dim() > 0:
        return inputs.shape[0]
    if _is_sequence(inputs) or _is_selectable(inputs):
        return len(inputs)
    raise ValueError(
        f"inputs of type {type(inputs).__name__}: a list, a tuple or another sequence, a datasets.Dataset, a "
        "tensor or array of one dimension or more, or a mapping of these is allowed"
    )


def _is_sequence(inputs: Any) -> bool:
    """Whether it is a sequence of items, or a NumPy array, told by name: it need not be installed."""
    if type(inputs).__module__ == "numpy":
        return getattr(inputs, "ndim", 0) > 0
    return isinstance(inputs, Sequence) and not isinstance(inputs, (str, bytes, bytearray))


def _is_selectable(inputs: Any) -> bool:
    """Whether it is a `datasets.Dataset`, which gives some of its rows as another one; told by name."""
    packages = {kind.__module__.partition(".")[0] for kind in type(inputs).__mro__}
    return "datasets" in packages and hasattr(inputs, "__len__") and hasattr(inputs, "select")


def _take(inputs: Nested, positions: Sequence[int]) -> Nested:
    if isinstance(inputs, Mapping):
        return {key: _take(value, positions) for key, value in cast("Mapping[Any, Any]", inputs).items()}
    if isinstance(inputs, torch.Tensor):
        if isinstance(positions, range):
            return inputs[positions.start : positions.stop]
        return inputs[torch.tensor(positions, dtype=torch.int64, device=inputs.device)]
    if _is_selectable(inputs):
        return inputs.select(positions)
    if type(inputs).__module__ == "numpy":
        return inputs[list(positions)]
    if isinstance(positions, range) and not isinstance(inputs, (tuple, deque)):
        return inputs[positions.start : positions.stop]
    items = [inputs[position] for position in positions]
    return tuple(items) if isinstance(inputs, tuple) else items
