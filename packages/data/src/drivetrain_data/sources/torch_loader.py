"""Rebuild a user's DataLoader with another sampler or dataset, if the loader reads as torch's own class does."""

from typing import Any, cast

import torch
from torch.utils.data import DataLoader, IterableDataset

from drivetrain_data.compat import ITERATOR_METHODS
from drivetrain_data.state.torchdata_state import torchdata_kind

# Kinds that execute in the order of the calls: side streams order nothing there, and no memory is pinned for them.
IN_ORDER = ("mps", "tpu")


def is_stock(loader: Any) -> bool:
    """Return whether a loader reads as torch's DataLoader does, so that it can be rebuilt with another sampler."""
    if not isinstance(loader, DataLoader):
        return False
    kind = type(cast("Any", loader))
    if kind.__module__.startswith("torchdata.stateful_dataloader"):
        return not isinstance(cast("Any", loader).dataset, IterableDataset)
    own = set(kind.__mro__[: kind.__mro__.index(DataLoader)])
    return not any(ITERATOR_METHODS & set(vars(one)) for one in own)


def rebuild(
    loader: DataLoader[Any], dataset: Any, generator: torch.Generator | None, kind: Any = None, **layout: Any
) -> DataLoader[Any]:
    """Return a loader of a dataset with the user's options, changed by `layout`; `kind` is its class."""
    options = {name: getattr(loader, name) for name in _KEPT}
    if loader.pin_memory_device:
        options["pin_memory_device"] = loader.pin_memory_device
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None and accelerator.type in IN_ORDER:
        options["pin_memory"] = False
    kind = kind or torchdata_kind(loader) or DataLoader
    return kind(dataset, generator=generator, **{**options, **layout})


_KEPT = (
    *("collate_fn", "num_workers", "pin_memory", "timeout", "worker_init_fn"),
    *("multiprocessing_context", "prefetch_factor", "persistent_workers"),
)
