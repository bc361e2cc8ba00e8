"""The number of steps that a scheduler is made for, if the scheduler states a number."""

from collections.abc import Mapping
from math import ceil
from types import FunctionType
from typing import Any

from torch.optim.lr_scheduler import ConstantLR

from drivetrain_backends.compat import SCHEDULE_LENGTHS, SCHEDULE_PARTS, milestones_of, schedulers_in

_STAGES = ("num_warmup_steps", "num_stable_steps", "num_decay_steps")


def total_of(scheduler: Any) -> int | None:
    """Return the number of steps that a scheduler is made for; None if the scheduler does not state a number."""
    if (parts := schedulers_in(scheduler)) and milestones_of(scheduler):
        return _add_milestones(scheduler, total_of(parts[-1]))
    if parts:
        return max((total for one in parts if (total := total_of(one)) is not None), default=None)
    for attribute in ("total_steps", "T_max", "total_iters", "total_num_steps"):  # the last is DeepSpeed's
        if isinstance(total := getattr(scheduler, attribute, None), int | float):
            return ceil(total)
    totals = map(_total_of_function, getattr(scheduler, "lr_lambdas", ()))
    return next((total for total in totals if total is not None), None)


def end_of(scheduler: Any) -> int | None:
    """Return the step after which a schedule no longer defines the rates; None if no step ends the schedule.

    A warm-up has no such end: training may go on at the optimizer's own rate.
    """
    if (parts := schedulers_in(scheduler)) and milestones_of(scheduler):
        return _add_milestones(scheduler, end_of(parts[-1]))
    if parts:
        ends = [end_of(one) for one in parts if not _is_warm_up(one)]
        known = [end for end in ends if end is not None]
        return max(known) if known and len(known) == len(ends) else None
    return None if _is_warm_up(scheduler) else total_of(scheduler)


def position_of(scheduler: Any) -> int:
    """Return the number of steps that a scheduler has advanced; 0 if the scheduler does not count them."""
    at = getattr(scheduler, "last_epoch", None)
    if isinstance(at, int):
        return at
    at = getattr(scheduler, "last_batch_iteration", None)  # DeepSpeed's, which begin at -1
    if isinstance(at, int):
        return at + 1
    return max(map(position_of, schedulers_in(scheduler)), default=0)


def with_length_of(saved: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return a scheduler's `saved` state, but with the schedule lengths of its `own` state."""
    merged = dict(saved)
    for key, value in own.items():
        if key in SCHEDULE_LENGTHS and key in saved:
            merged[key] = value
        elif key in SCHEDULE_PARTS and len(saved.get(key, ())) == len(value):
            merged[key] = [
                with_length_of(one, other) if one and other else one
                for one, other in zip(saved[key], value, strict=True)
            ]
    return merged


def _add_milestones(scheduler: Any, last: int | None) -> int | None:
    return None if last is None else milestones_of(scheduler)[-1] + last


def _is_warm_up(scheduler: Any) -> bool:
    return isinstance(scheduler, ConstantLR) or getattr(scheduler, "end_factor", None) == 1


def _total_of_function(function: Any) -> int | None:
    """Return the length of a schedule function: a `partial` from transformers, or a closure from Diffusers."""
    known: Mapping[str, Any] = getattr(function, "keywords", None) or getattr(function, "__dict__", {})
    if isinstance(function, FunctionType) and function.__closure__:
        cells = zip(function.__code__.co_freevars, function.__closure__, strict=True)
        known = {name: cell.cell_contents for name, cell in cells if name.startswith("num_")}
    if isinstance(total := known.get("num_training_steps"), int):
        return total
    stages = [known.get(name) for name in _STAGES]
    counts = [stage for stage in stages if isinstance(stage, int)]
    return sum(counts) if len(counts) == len(stages) else None
