"""Read PyTorch's own weight files without running code from them."""

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drivetrain_dispatch.errors import WeightFilesError

PICKLED_SUFFIXES = (".bin", ".pt", ".pth")


def map_pickled(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file that `torch.save` wrote, as its pages, which are read on first use.

    Only tensors and plain containers are unpickled; no code from the file runs.

    Args:
        path: The file to map.

    Raises:
        FileNotFoundError: The file is missing.
        WeightFilesError: The file is truncated, in the format before torch 1.6, or contains anything other than
            tensors by name.
    """
    try:
        held: Any = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        raise WeightFilesError(
            f"{path} is refused: to build what it holds would run code out of it. If you trust who wrote it, load it "
            "with torch.load yourself, and save its weights with safetensors.torch.save_file"
        ) from error
    except (RuntimeError, EOFError, IsADirectoryError) as error:
        raise WeightFilesError(
            f"{path} cannot be mapped ({_first_line(error)}): it was cut or damaged, or is in the format before "
            "torch 1.6; load it with torch.load, and save its weights with safetensors.torch.save_file"
        ) from error
    if not isinstance(held, Mapping) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in held.items()
    ):
        raise WeightFilesError(
            f"{path} holds {_described(held)}: must be a dict of tensors by name, as model.state_dict() is; save "
            "that part of it by itself"
        )
    return dict(held)


def _described(held: object) -> str:
    if not isinstance(held, Mapping):
        return f"a {type(held).__name__}"
    others = [
        f"{name!r} ({type(value).__name__})" for name, value in held.items() if not isinstance(value, Tensor)
    ]
    return f"values that are not tensors, {', '.join(others[:5])}" if others else "names that are not strings"


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
