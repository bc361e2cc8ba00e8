"""Find what wants to know the epoch in a user's dataset and collate function."""

from collections.abc import Iterator
from typing import Any, cast

from torch.utils.data import Dataset

from drivetrain_data.state.sampler_parts import LOOKED_THROUGH


def epoch_parts(dataset: Any, collate: Any = None) -> Iterator[Any]:
    """Yield the outermost objects with a `set_epoch` in a dataset, datasets that it wraps, and a collate function.

    What such an object holds is its own affair: it may pass on another number than the epoch.
    """
    seen: set[int] = set()
    waiting = [dataset, collate, getattr(collate, "__self__", None)]
    while waiting:
        part = waiting.pop(0)
        if id(part) in seen:
            continue
        seen.add(id(part))
        if callable(getattr(part, "set_epoch", None)):
            yield part
        elif isinstance(part, Dataset):
            waiting += _datasets_in(cast("Any", part))


def _datasets_in(dataset: Any) -> list[Any]:
    found: list[Any] = []
    for value in getattr(dataset, "__dict__", {}).values():
        held = value.values() if isinstance(value, dict) else value
        many = isinstance(value, list | tuple | dict) and len(cast("Any", value)) <= LOOKED_THROUGH
        found += [one for one in (cast("Any", held) if many else [value]) if isinstance(one, Dataset)]
    return found
