"""The private names of torch, torchdata and datasets that this package uses, in one place.

They have no public API. They are the same in torch 2.9 to 2.15 and torchdata 0.8 to 0.11; tests/data/test_compat.py
holds each one to what is relied on, and docs/design/platforms.md lists them.
"""

from typing import Any

from torch.autograd import profiler

# The methods by which torch's DataLoader makes its iterator: a subclass that has its own reads in another way.
ITERATOR_METHODS = frozenset({"__iter__", "_get_iterator"})

# The keys of a state of torchdata's StatefulDataLoader, without workers and with them.
NUM_YIELDED, FINISHED = "_num_yielded", "_iterator_finished"
SNAPSHOT, STEPS_SINCE = "_snapshot", "_steps_since_snapshot"
# The keys of its snapshot.
SNAPSHOT_STEP, MAIN_SNAPSHOT, WORKER_SNAPSHOTS = "_snapshot_step", "_main_snapshot", "_worker_snapshots"
# The keys of what a state without workers, or the main part of a snapshot, tells about the sampler.
NUM_WORKERS, SAMPLER_YIELDED, SAMPLER_STATE = "_num_workers", "_sampler_iter_yielded", "_sampler_iter_state"


def is_profiled() -> bool:
    """Return whether torch's profiler records at present, by whoever started it."""
    return profiler._is_profiler_enabled  # pyright: ignore[reportPrivateUsage]


def fingerprint_of(dataset: Any) -> str | None:
    """Return a dataset's own fingerprint of its content, as Hugging Face datasets have, or None."""
    found = getattr(dataset, "_fingerprint", None)
    return found if isinstance(found, str) else None
