"""Gather results in an epoch's tail, whose size every rank knows without communication."""

from contextlib import suppress
from typing import Any

from drivetrain.parts.parts import Parts
from drivetrain_data import AmbiguousLoaderError, ShardedLoader, check_after_loop, trim, trim_objects
from drivetrain_data.remainder import arrays_in, trim_arrays, with_arrays, without_arrays
from drivetrain_state import LeafError
from drivetrain_state.collectives import operations as collectives


def gather(parts: Parts, data: Any) -> Any:
    """Gather over ranks; in an epoch's tail, where sizes may differ, exchange the sizes too."""
    try:
        plan = parts.reading.plan() or parts.reading.left
    except AmbiguousLoaderError:  # two loaders are being read, and one is in its tail: assume the tail
        uneven = True
    else:
        uneven = plan is not None and not plan.equal_sizes
    return collectives.gather(parts.context, data, uneven=uneven)


def gather_for_metrics(
    parts: Parts, data: Any, *, as_objects: bool, loader: ShardedLoader[Any] | None
) -> Any:
    """Gather results of the current batch, each sample once and in the dataset's order.

    Args:
        parts: The parts of the Accelerator.
        data: Nested tensors and NumPy arrays, or objects.
        as_objects: Whether to gather a list of objects.
        loader: The loader of the batch, where it is ambiguous.
    """
    plan = parts.reading.plan(loader)
    if loader is None:
        check_after_loop(parts.reading.left, data)  # also inside an outer loop
    if not as_objects:
        # Data with a leaf that is neither tensor nor array has one on every rank: all gather it as objects.
        with suppress(LeafError):
            arrays = arrays_in(data)
            # The user may have dropped rows, so that batch sizes do not give their number: always exchange sizes.
            tensors = without_arrays(data) if arrays else data
            gathered, rows = collectives.gather_rows(parts.context, tensors, over="reads")
            found = trim(plan, gathered, rows=rows)
            if not arrays:
                return found
            by_rank = collectives.gather_object(parts.context, arrays, over="reads")
            return with_arrays(data, found, trim_arrays(plan, by_rank))
    return trim_objects(plan, collectives.gather_object(parts.context, data, over="reads"))
