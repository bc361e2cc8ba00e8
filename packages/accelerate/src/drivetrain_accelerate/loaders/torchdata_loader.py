"""torchdata's StatefulDataLoader, where a program asks for it."""

from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from drivetrain_accelerate.libraries.availability import is_torchdata_stateful_dataloader_available
from drivetrain_data.sources.torch_loader import is_stock, rebuild


def find_stateful_kind() -> type[DataLoader[Any]]:
    """Return torchdata's class.

    Raises:
        ImportError: torchdata is not installed, or too old.
    """
    if not is_torchdata_stateful_dataloader_available():
        raise ImportError(
            "use_stateful_dataloader=True: torchdata 0.8 or newer is not installed; pip install 'torchdata>=0.8', or "
            "leave it out: a prepared loader has state_dict() without it"
        )
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader


def make_stateful(loader: Any) -> DataLoader[Any]:
    """Return torchdata's loader with the data and options of torch's.

    Raises:
        ImportError: torchdata is not installed, or too old.
        ValueError: The loader reads in a way of its own.
    """
    kind = find_stateful_kind()
    if isinstance(loader, kind):
        return loader
    if not is_stock(loader):
        raise ValueError(
            f"use_stateful_dataloader=True: {type(loader).__name__} reads in a way of its own, which "
            "torchdata's loader does not have: pass a DataLoader, or leave it out"
        )
    layout: dict[str, Any] = {"batch_sampler": loader.batch_sampler}
    if isinstance(loader.dataset, IterableDataset):
        layout = {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    elif loader.batch_sampler is None:
        layout = {"batch_size": None, "sampler": loader.sampler}
    return rebuild(loader, loader.dataset, loader.generator, kind, **layout)


def build_loader(use_stateful_dataloader: bool, dataset: Any, **options: Any) -> DataLoader[Any]:
    """Return a loader of torchdata's kind if it is asked for, else of torch's."""
    return (find_stateful_kind() if use_stateful_dataloader else DataLoader)(dataset, **options)
