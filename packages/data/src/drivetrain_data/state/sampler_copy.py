"""Copy what a user's sampler holds, so that it can be compared and restored."""

import io
import pickle
from typing import Any

from drivetrain_data.state.sampler_parts import CONTAINERS, LOOKED_THROUGH, is_apart


class SamplerCopy:
    """A copy of a sampler's current attributes, without generators, datasets, models and functions.

    Long containers are copied only if they hold numbers or strings; others are taken to hold data. The serialized
    `content` is equal for two copies of a sampler that did not change in between.
    """

    def __init__(self, sampler: object) -> None:
        self._sampler = sampler
        buffer = io.BytesIO()
        pickler = _Pickler(buffer, sampler)
        pickler.dump(vars(sampler))
        self._kept = pickler.kept
        self.content = buffer.getvalue()

    def restore(self) -> None:
        """Restore the attributes of the sampler."""
        attributes = _Unpickler(self.content, self._kept).load()
        vars(self._sampler).clear()
        vars(self._sampler).update(attributes)


def copy_of(sampler: object) -> SamplerCopy | None:
    """Return a copy of a sampler's attributes; None if it has none, or they cannot be copied."""
    if not hasattr(sampler, "__dict__"):
        return None
    try:
        return SamplerCopy(sampler)
    except (pickle.PicklingError, TypeError, AttributeError):
        return None


class _Pickler(pickle.Pickler):
    """A pickler of a sampler's attributes that keeps the parts that are not copied."""

    def __init__(self, buffer: io.BytesIO, sampler: object) -> None:
        super().__init__(buffer, protocol=pickle.HIGHEST_PROTOCOL)
        self._sampler = sampler
        self.kept: list[Any] = []

    def persistent_id(self, obj: Any) -> int | bytes | None:
        """Return the number of a part that is not copied, the pickled bytes of a long container, or else None."""
        if isinstance(obj, CONTAINERS) and len(obj) > LOOKED_THROUGH:  # pyright: ignore[reportUnknownArgumentType]
            if isinstance(next(iter(obj)), (int, float, str, bytes)):  # pyright: ignore[reportUnknownArgumentType]
                return pickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL)
        elif obj is not self._sampler and not is_apart(obj):
            return None
        self.kept.append(obj)
        return len(self.kept) - 1


class _Unpickler(pickle.Unpickler):
    def __init__(self, content: bytes, kept: list[Any]) -> None:
        super().__init__(io.BytesIO(content))
        self._kept = kept

    def persistent_load(self, pid: Any) -> Any:
        """Return the part that a persistent ID stands for."""
        return pickle.loads(pid) if isinstance(pid, bytes) else self._kept[pid]
