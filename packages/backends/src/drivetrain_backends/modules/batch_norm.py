"""Batch normalisation over the batches of all ranks: layers become torch's SyncBatchNorm in place."""

from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.distributed import ProcessGroup

from drivetrain_backends.compat import BatchNorm

_KINDS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_WITHOUT = ("cpu", "mps")  # torch 2.9 to 2.15 has no SyncBatchNorm kernels there


def batch_norms(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield every batch normalisation layer of a model with its name."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, BatchNorm))


def check_batch_norms(model: nn.Module, device: torch.device) -> None:
    """Refuse layers that cannot be synchronised."""
    for name, module in batch_norms(model):
        where = name or "the model"
        if device.type in _WITHOUT:
            raise ValueError(
                f"ddp.sync_batch_norm=True: torch has no SyncBatchNorm on {device.type}, and {where} is a "
                f"{type(module).__name__}; leave the setting off here (each rank then normalises its own batch), "
                "or train on a GPU"
            )
        if type(module) not in (*_KINDS, nn.SyncBatchNorm):
            raise ValueError(
                f"ddp.sync_batch_norm=True: {where} is a {type(module).__name__}, whose own forward "
                "SyncBatchNorm would not run; use BatchNorm1d, BatchNorm2d or BatchNorm3d there, or leave the "
                "setting off"
            )


def synchronise_batch_norms(
    models: Sequence[nn.Module], group: ProcessGroup | None
) -> dict[nn.Module, type[nn.Module]]:
    """Turn the batch normalisation layers of models into SyncBatchNorm; return their former classes.

    Only the class of a layer changes: modules, parameters, buffers, names and hooks stay the same objects, unlike
    under `SyncBatchNorm.convert_sync_batchnorm`.
    """
    layers = (module for model in models for _, module in batch_norms(model))
    found = {module: type(module) for module in layers if type(module) in _KINDS}
    for module in found:
        module.__class__ = nn.SyncBatchNorm
        module.process_group = group  # pyright: ignore[reportArgumentType] no Tensor or Module, as in its __init__
    return found


def restore_batch_norms(kinds: dict[nn.Module, type[nn.Module]]) -> None:
    """Undo `synchronise_batch_norms`; `kinds` are the former classes that it returned."""
    for module, kind in kinds.items():
        module.__class__ = kind
        del module.process_group
