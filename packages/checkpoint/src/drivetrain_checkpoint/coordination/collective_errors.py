"""All ranks or none: an action that fails on one rank fails on every rank."""

from collections.abc import Callable
from functools import partial
from typing import TypeAlias, TypeVar, cast

from drivetrain_checkpoint.errors import OtherRankFailedError
from drivetrain_state import Context, gather_object

Value = TypeVar("Value")


# What became of an action on a rank: its result, or the error in words.
Outcome: TypeAlias = tuple[object, str | None]


def on_all_ranks(
    context: Context,
    action: Callable[[], Value],
    *,
    doing: str,
    gather: Callable[[Outcome], list[Outcome]] | None = None,
) -> list[Value]:
    """Do something on every rank and wait until all have done it. Called on all ranks.

    Args:
        context: This process among the others.
        action: What this rank does; its result travels to the other ranks.
        doing: What it is, for the message.
        gather: How outcomes travel; None: by the process group, which the main thread alone may use.

    Returns:
        The results of all ranks, in rank order.

    Raises:
        Exception: Whatever `action` raised on this rank.
        OtherRankFailedError: It raised on another rank; the message holds that rank's error.
    """
    result: Value | None = None
    failure: Exception | None = None
    try:
        result = action()
    except Exception as error:  # noqa: BLE001 - raised below, as soon as every rank knows of it
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
    """Do something on every rank and wait until all have done it; each keeps its own result. Called on all ranks.

    Returns:
        This rank's result.

    Raises:
        Exception: Whatever `action` raised on this rank.
        OtherRankFailedError: It raised on another rank; the message holds that rank's error.
    """
    results: list[Value] = []
    on_all_ranks(context, lambda: results.append(action()), doing=doing)
    return results[0]


def on_main(context: Context, action: Callable[[], Value], *, doing: str) -> Value:
    """Do something on rank 0 while the others wait for its result. Called on all ranks.

    Returns:
        Rank 0's result, on every rank.

    Raises:
        Exception: Whatever `action` raised on rank 0, there.
        OtherRankFailedError: The same elsewhere; the message holds that error.
    """
    is_main = context.topology.is_main
    return cast("Value", on_all_ranks(context, lambda: action() if is_main else None, doing=doing)[0])
