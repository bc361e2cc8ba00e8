"""Read untrusted files of `torch.save` without running any code in them."""

from collections.abc import Callable
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from drivetrain_checkpoint.errors import CorruptCheckpointError, ForeignStateError

# The function that NumPy 1 pickles arrays with; NumPy 2 has moved it.
_EARLIER_NAME = "numpy.core.multiarray._reconstruct"


def read_pickle(path: Path, *, mapped: bool = False) -> Any:
    """Read a file of `torch.save`: tensors, plain values and NumPy arrays, on the CPU.

    Args:
        path: The path of the file.
        mapped: Whether to memory-map the tensors, which reads them on use; until then the file must not change.

    Raises:
        ForeignStateError: The file holds objects of other classes; the message names them. None of their code ran.
        CorruptCheckpointError: The file is not a complete file of `torch.save`.
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
    """Return the names of globals that a file would import; None if it is not an archive of `torch.save`."""
    try:
        with safe_globals(_numpy_globals()):
            return ", ".join(sorted(get_unsafe_globals_in_checkpoint(path))[:5]) or "instructions of pickle"
    except (UnpicklingError, RuntimeError, ValueError):
        return None


def _numpy_globals() -> list[Callable[..., Any] | tuple[Callable[..., Any], str]]:
    """Return the globals that pickled arrays of numbers need; none if NumPy is not installed."""
    try:
        import numpy
    except ImportError:
        return []
    multiarray: Any = numpy.zeros(0).__reduce__()[0]
    number_types: list[Any] = [type(numpy.dtype(code)) for code in numpy.typecodes["AllInteger"] + "?efd"]
    return [multiarray, (multiarray, _EARLIER_NAME), numpy.ndarray, numpy.dtype, *set(number_types)]
