"""Run actions that succeed on all ranks or fail on all."""

from collections.abc import Callable
from functools import partial
from typing import TypeAlias, TypeVar, cast

from drivetrain_state.collectives.operations import gather_object
from drivetrain_state.context import Context
from drivetrain_state.errors import OtherRankFailedError

Value = TypeVar("Value")

# The outcome of an action on a rank: its result, and the text of its error or None.
Outcome: TypeAlias = tuple[object, str | None]


def on_all_ranks(
    context: Context,
    action: Callable[[], Value],
    *,
    doing: str,
    gather: Callable[[Outcome], list[Outcome]] | None = None,
) -> list[Value]:
    """Run an action on every rank and return the results of all, in rank order. Called on all ranks.

    If the action fails, this rank raises the action's error. Other ranks raise an OtherRankFailedError with the error
    and the text `doing`. Without `gather`, the process group gathers outcomes; then call this in the main thread.
    """
    result: Value | None = None
    failure: Exception | None = None
    try:
        result = action()
    except Exception as error:  # noqa: BLE001 - raised below, after the gather: the other ranks wait in it
        failure = error
    told = None if failure is None else f"{type(failure).__name__}: {failure}"
    outcomes = (gather or partial(gather_object, context))((result, told))
    if failure is not None:
        raise failure
    failures = [
        f"rank {rank} failed with {told}" for rank, (_, told) in enumerate(outcomes) if told is not None
    ]
    if failures:
        raise OtherRankFailedError(f"{doing} was given up on every rank: {'; '.join(failures)}")
    return [cast("Value", value) for value, _ in outcomes]


def on_each_rank(context: Context, action: Callable[[], Value], *, doing: str) -> Value:
    """Run an action on every rank, wait for all, and return this rank's result; errors as from `on_all_ranks`."""
    results: list[Value] = []
    on_all_ranks(context, lambda: results.append(action()), doing=doing)
    return results[0]


def on_main(context: Context, action: Callable[[], Value], *, doing: str) -> Value:
    """Run an action on rank 0 and return its result on every rank; errors as from `on_all_ranks`."""
    is_main = context.topology.is_main
    return cast("Value", on_all_ranks(context, lambda: action() if is_main else None, doing=doing)[0])
