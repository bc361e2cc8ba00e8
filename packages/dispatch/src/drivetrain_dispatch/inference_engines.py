"""Engines of other libraries that run a model's inference, by the entry points of installed packages."""

from importlib.metadata import entry_points
from pathlib import Path
from typing import Protocol, cast

import torch
from torch import nn

from drivetrain_dispatch.errors import EngineNotFoundError
from drivetrain_messages import suggest

_GROUP = "drivetrain.inference_engines"


class InferenceEngine(Protocol):
    """An engine: a function that takes a loaded model, and returns the one to call. Called on all ranks."""

    def __call__(
        self, model: nn.Module, *, dtype: torch.dtype | None, offload_folder: Path | None
    ) -> nn.Module:
        """Return a model that computes what the given one does, which it may take apart.

        Args:
            model: The model, whose weights are on the host.
            dtype: The dtype in which floating-point tensors compute; None keeps those of the model.
            offload_folder: A folder on a fast local disk, for weights that the host has no room for.
        """
        ...


def find_engine(name: str) -> InferenceEngine:
    """Return the engine of a name.

    Raises:
        EngineNotFoundError: No installed package provides it.
    """
    found = {point.name: point for point in entry_points(group=_GROUP)}
    if name not in found:
        known = ", ".join(sorted(found)) or "none"
        raise EngineNotFoundError(
            f"engine={name!r}: no installed package provides it{suggest(name, found)}; there are: {known}"
        )
    return cast("InferenceEngine", found[name].load())
