"""The private names of torch and torch-xla that this package uses, in one place.

They have no public API. Torch's are the same in torch 2.9 to 2.15; tests/state/test_compat.py holds each one
to what is relied on, and docs/design/platforms.md lists them.
"""

import sys
from typing import Any

from torch.autograd import profiler
from torch.distributed.distributed_c10d import (
    _get_default_store,  # pyright: ignore[reportPrivateUsage]
    _resolve_process_group,  # pyright: ignore[reportPrivateUsage]
)

# Returns the store in which the ranks of the default process group met.
default_store = _get_default_store

# Returns the process group of a name; RuntimeError if it has ended.
group_by_name = _resolve_process_group


def is_profiled() -> bool:
    """Return whether torch's profiler records at present, by whoever started it."""
    return profiler._is_profiler_enabled  # pyright: ignore[reportPrivateUsage]


def xla_in_use() -> Any:
    """Return torch-xla's module with its generator; None before the first tensor on XLA, since reading it is a use.

    A process whose XLA is in use can no longer begin SPMD.
    """
    model: Any = sys.modules.get("torch_xla.core.xla_model")
    extension: Any = sys.modules.get("_XLAC")
    in_use = extension is not None and extension._xla_get_spmd_config_is_locked()  # pyright: ignore[reportPrivateUsage]
    return model if in_use else None
