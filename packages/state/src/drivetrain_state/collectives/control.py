"""Control of execution by rank: run functions on some ranks, run one process first, split inputs among processes."""

from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import Any, ParamSpec, TextIO, TypeAlias, TypeVar, cast

import torch

from drivetrain_state.collectives.nested import Nested
from drivetrain_state.collectives.operations import barrier, check_rank
from drivetrain_state.context import Context

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
OnSomeRanks: TypeAlias = Callable[[Callable[Arguments, Result]], Callable[Arguments, Result | None]]


def on_main_process(context: Context) -> OnSomeRanks[Arguments, Result]:
    """Return a decorator that runs the function on rank 0 only; on other ranks the call returns None."""
    return _run_only_if(context.topology.is_main)


def on_local_main_process(context: Context) -> OnSomeRanks[Arguments, Result]:
    """Return a decorator that runs the function on the first rank of each node; elsewhere the call returns None."""
    return _run_only_if(context.topology.is_local_main)


def on_last_process(context: Context) -> OnSomeRanks[Arguments, Result]:
    """Return a decorator that runs the function on the last rank only; on other ranks the call returns None."""
    return _run_only_if(context.topology.is_last)


def on_process(context: Context, index: int) -> OnSomeRanks[Arguments, Result]:
    """Return a decorator that runs the function on rank `index` only; ValueError if there is no such rank."""
    check_rank(context, index, "index")
    return _run_only_if(context.topology.rank == index)


def _run_only_if(chosen: bool) -> OnSomeRanks[Arguments, Result]:
    def decorate(function: Callable[Arguments, Result]) -> Callable[Arguments, Result | None]:
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
    """Print on rank 0 only, like `print`. The output is flushed at once unless `flush=False`."""
    if context.topology.is_main:
        print(*values, sep=sep, end=end, file=file, flush=flush)


def main_process_first(context: Context) -> AbstractContextManager[None]:
    """Run the block on rank 0 first, then on the other ranks. Must be called on all ranks.

    Use it for work that leaves a file for the other ranks, such as a prepared dataset. If rank 0 raises, the other
    ranks still proceed.
    """
    return _let_first(context, context.topology.is_main)


def local_main_process_first(context: Context) -> AbstractContextManager[None]:
    """Run the block on the first rank of each node, then on the other ranks. Must be called on all ranks."""
    return _let_first(context, context.topology.is_local_main)


@contextmanager
def _let_first(context: Context, goes_first: bool) -> Generator[None]:
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
    """Yield this rank's part of `inputs`, without communication. Every rank must hold all `inputs`.

    Parts are contiguous and in rank order. Their sizes differ by at most one, and the first ranks get the longer
    parts; with fewer items than processes the last ranks get none.

    Args:
        context: The context of this process.
        inputs: A list, a tuple, another sequence that can be sliced, a `datasets.Dataset`, a tensor or NumPy array
            (split along the first dimension), or a mapping of these with equal lengths. With padding, other
            sequences come back as lists.
        apply_padding: Whether to pad short parts with the last item of `inputs`, so that all parts have the same
            length and can be gathered.

    Raises:
        ValueError: If `inputs` is of another type, the lengths in a mapping differ, or `inputs` is empty and
            `apply_padding` is set.
    """
    yield split_for_process(
        inputs, context.topology.rank, context.topology.world_size, apply_padding=apply_padding
    )


def split_for_process(inputs: Nested, index: int, count: int, *, apply_padding: bool = False) -> Nested:
    """Return part `index` of `count` parts of `inputs`, split as by `split_between_processes`."""
    length = _length(inputs)
    if apply_padding and length == 0:
        raise ValueError("apply_padding=True with empty inputs: there is no last item to pad with")
    return _take(inputs, part_positions(length, index, count, apply_padding=apply_padding))


def part_positions(length: int, index: int, count: int, *, apply_padding: bool = False) -> Sequence[int]:
    """Return which positions of `length` items belong to part `index` of `count`; padding repeats the last item."""
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
    # NumPy's arrays and Hugging Face's datasets are recognized by name, as neither may be installed.
    is_array = type(inputs).__module__ == "numpy" and getattr(inputs, "ndim", 0) > 0
    is_sequence = isinstance(inputs, Sequence) and not isinstance(inputs, (str, bytes, bytearray))
    if is_array or is_sequence or _is_selectable(inputs):
        return len(inputs)
    raise ValueError(
        f"inputs of type {type(inputs).__name__}: a list, a tuple or another sequence, a datasets.Dataset, a "
        "tensor or array of one dimension or more, or a mapping of these is allowed"
    )


def _is_selectable(inputs: Any) -> bool:
    """Return whether `inputs` is a `datasets.Dataset`."""
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
