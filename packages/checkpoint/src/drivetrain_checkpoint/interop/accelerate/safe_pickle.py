"""Files of `torch.save` from strangers, read without running any code of theirs."""

from collections.abc import Callable
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from drivetrain_checkpoint.errors import CorruptCheckpointError, ForeignStateError

# What plain NumPy arrays were pickled with by NumPy 1; NumPy 2 has moved it.
_EARLIER_NAME = "numpy.core.multiarray._reconstruct"


def read_pickle(path: Path, *, mapped: bool = False) -> Any:
    """Read what `torch.save` wrote: tensors, plain values and NumPy arrays, on the CPU.

    Args:
        path: The file.
        mapped: Whether tensors are read when they are used; until then the file must stay as it is.

    Raises:
        ForeignStateError: It holds objects of other classes; the message names them. Nothing of them was run.
        CorruptCheckpointError: It is no whole file of `torch.save`.
    """
    try:
        with safe_globals(_numpy_globals()):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except UnpicklingError as error:
        if (unsafe := _unsafe(path)) is None:
            raise CorruptCheckpointError(f"{path} is no whole file of torch.save") from error
        raise ForeignStateError(
            f"{path.name} holds more than tensors and plain values ({unsafe}), and reading that could run code: save "
            "those objects as plain values, or remove the file to go on without it"
        ) from error
    except (RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        raise CorruptCheckpointError(f"{path} is no whole file of torch.save: {error}") from error


def _unsafe(path: Path) -> str | None:
    """The names that a file wants imported; None where it is no archive of `torch.save`."""
    try:
        with safe_globals(_numpy_globals()):
            return ", ".join(sorted(get_unsafe_globals_in_checkpoint(path))[:5]) or "instructions of pickle"
    except (UnpicklingError, RuntimeError, ValueError):
        return None


def _numpy_globals() -> list[Callable[..., Any] | tuple[Callable[..., Any], str]]:
    """What arrays of numbers are made of; nothing where NumPy is not installed."""
    try:
        import numpy
    except ImportError:
        return []
    multiarray: Any = numpy.zeros(0).__reduce__()[0]
    number_types: list[Any] = [type(numpy.dtype(code)) for code in numpy.typecodes["AllInteger"] + "?efd"]
    return [multiarray, (multiarray, _EARLIER_NAME), numpy.ndarray, numpy.dtype, *set(number_types)]
