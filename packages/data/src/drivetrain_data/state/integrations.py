"""Find other libraries' streams that divide the data themselves or have an incomplete state.

Streams are recognised by the names of their parts, so none of these libraries need be installed.
"""

import inspect
import logging
from collections.abc import Iterator, Mapping
from hashlib import sha256
from typing import Any, cast

import numpy as np
from torch.utils.data import IterableDataset

from drivetrain_data.state.sampler_parts import reachable

logger = logging.getLogger(__name__)


def check_undivided_stream(stream: Any, *, alone: bool) -> None:
    """Raise ValueError if a stream divides the data among ranks: sharding it again would lose most samples.

    If only one shard reads the stream (`alone`), a part from Hugging Face's `split_dataset_by_node` is read in full,
    and a warning is logged.
    """
    for part in _parts(stream):
        kind = type(part)
        split: Any = getattr(part, "_distributed", None)
        if alone and getattr(split, "world_size", 1) > 1:
            logger.warning(
                "%s was divided by split_dataset_by_node: this process reads part %d of %d, and nothing more",
                kind.__name__,
                split.rank,
                split.world_size,
            )
        elif getattr(split, "world_size", 1) > 1:
            raise ValueError(
                f"{kind.__name__} divides the data itself (rank {split.rank} of {split.world_size}), and would be "
                "divided twice; pass the undivided one, without split_dataset_by_node"
            )
        if any(
            _package(base) == "streaming" and base.__name__ == "StreamingDataset" for base in kind.__mro__
        ):
            raise ValueError(
                f"{kind.__name__} divides the data itself, by the ranks that it finds in the environment, and its "
                "state is that of all ranks; read it with MosaicML's own StreamingDataLoader, neither prepared nor "
                "sharded here, and save that loader's state_dict()"
            )


def left_out_of_state(stream: Any, num_workers: int) -> str | None:
    """Describe what a stream's state lacks with `num_workers` workers; None if nothing is known to be missing."""
    state_dict = getattr(stream, "state_dict", None)
    if state_dict is None:
        return None
    asked = [name for name, it in inspect.signature(state_dict).parameters.items() if it.default is it.empty]
    asked = [name for name in asked if name not in ("args", "kwargs")]
    if asked:
        raise TypeError(
            f"{type(stream).__name__}.state_dict asks for {', '.join(asked)}, but is called without arguments; wrap "
            "the stream in an IterableDataset whose state_dict() passes the arguments, or that has no state_dict()"
        )
    sizes = [
        part.buffer_size
        for part in _parts(stream)
        if type(part).__name__ == "BufferShuffledExamplesIterable" and part.buffer_size > 1
    ]
    if sizes:
        return f"its shuffle buffer of {max(sizes)} samples"
    # A worker's state is first loaded into the undivided stream, whose lists are longer: as of datasets 5.2 this
    # raises IndexError or repeats samples.
    made_of_theirs = any(_package(type(part)) == "datasets" for part in _parts(stream))
    if num_workers > 1 and made_of_theirs and _has_list(state_dict()):
        return f"which of its sources are read by which of {num_workers} workers"
    return None


def own_draws(stream: Any) -> str | None:
    """Return a hash of the generators and buffer sizes with which a Hugging Face stream shuffles, or None."""
    states = [
        f"{getattr(part, 'buffer_size', None)} {generator.bit_generator.state}"
        for part, generator in _shuffles(stream)
    ]
    return sha256("".join(states).encode()).hexdigest()[:16] if states else None


def shuffles_unseeded(stream: Any) -> bool:
    """Return whether a Hugging Face stream shuffles without a seed and so differently in every process."""
    return any(
        cast("Any", generator.bit_generator).seed_seq.entropy >= 2**64 for _, generator in _shuffles(stream)
    )


def _shuffles(stream: Any) -> Iterator[tuple[Any, np.random.Generator]]:
    for part in _parts(stream):
        if _package(type(part)) == "datasets":
            for value in vars(part).values():
                if isinstance(value, np.random.Generator):
                    yield part, value


def _parts(stream: Any) -> Iterator[Any]:
    """Yield a stream and the streams that it is made of."""
    return reachable(stream, _streams_in)


def _streams_in(part: Any) -> list[Any]:
    found: list[Any] = []
    for value in getattr(part, "__dict__", {}).values():
        inner = cast("list[Any]", list(value[:64]) if isinstance(value, list | tuple) else [value])
        found += [
            one for one in inner if isinstance(one, IterableDataset) or _package(type(one)) == "datasets"
        ]
    return found


def _has_list(state: Any) -> bool:
    if isinstance(state, Mapping):
        return any(_has_list(value) for value in cast("Mapping[str, Any]", state).values())
    return isinstance(state, list)


def _package(kind: type) -> str:
    return kind.__module__.partition(".")[0]
