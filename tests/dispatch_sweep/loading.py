"""The steps of the sweep that load what a model's own save_pretrained wrote: ours, and the library's."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from drivetrain_dispatch import load_pretrained


def loaded(saved: nn.Module, folder: Path, device_map: Mapping[str, str] | str, **options: Any) -> nn.Module:
    """Return the model that a folder describes, loaded by us and dispatched.

    Args:
        saved: Who wrote the folder.
        folder: It.
        device_map: A map, or how to plan one.
        options: More of `load_pretrained`.
    """
    return load_pretrained(type(saved), folder, device_map=device_map, **options)


def loaded_by_its_library(saved: nn.Module, folder: Path, dtype: torch.dtype) -> nn.Module:
    """Return the model that a folder describes, as transformers or diffusers loads it into memory."""
    kind: Any = type(saved)
    named = "torch_dtype" if hasattr(kind, "load_config") else "dtype"
    return kind.from_pretrained(folder, **{named: dtype}).eval()
