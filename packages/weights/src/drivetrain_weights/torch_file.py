"""Read files of `torch.save` without running code from them: the one restricted unpickler."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from drivetrain_weights.errors import UnsafePickleError, WeightFilesError
from drivetrain_weights.regular_file import check_regular
from drivetrain_weights.torch_records import checked_records

TORCH_SUFFIXES = (".bin", ".pt", ".pth")
# The function that NumPy 1 pickles arrays with; NumPy 2 has moved it.
_EARLIER_NAME = "numpy.core.multiarray._reconstruct"
_NUM_SHOWN = 5


def read_torch_file(path: Path, *, mapped: bool = False, arrays: bool = False) -> Any:
    """Read a file of `torch.save` on the CPU: tensors and plain values; no code from the file runs.

    Args:
        path: The path of the file.
        mapped: Whether to memory-map the tensors, which reads them on use; until then the file must not change.
        arrays: Whether NumPy arrays of numbers are read too.

    Raises:
        UnsafePickleError: The file holds objects of other classes.
        WeightFilesError: The file is missing, truncated or no regular file. If `mapped`: the file is compressed or in
            the format before torch 1.6.
    """
    try:
        check_regular(path)
        with _allow(arrays), checked_records(path) if mapped else nullcontext():
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except WeightFilesError:
        raise
    except FileNotFoundError as error:
        raise WeightFilesError(f"{path} is missing") from error
    except UnpicklingError as error:
        try:
            with _allow(arrays):
                names = sorted(get_unsafe_globals_in_checkpoint(path))
        except (UnpicklingError, RuntimeError, ValueError):  # it is no archive of `torch.save`
            raise _describe_damage(path, error) from error
        found = ", ".join(names[:_NUM_SHOWN]) or "instructions of pickle"
        raise UnsafePickleError(
            f"{path} is refused: to build what it holds ({found}) would run code out of it. If you trust who "
            "wrote it, load it with torch.load yourself, and save its weights with safetensors.torch.save_file",
            found=found,
        ) from error
    except (RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        raise _describe_damage(path, error) from error


def map_tensors(path: Path) -> dict[str, Tensor]:
    """Map a file that `torch.save` wrote, and return its tensors by name. Pages are read on first use."""
    held = read_torch_file(path, mapped=True)
    if not isinstance(held, Mapping) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in held.items()
    ):
        raise WeightFilesError(
            f"{path} holds {_describe(held)}: must be a dict of tensors by name, as model.state_dict() is; save "
            "that part of it by itself"
        )
    return dict(held)


def _describe_damage(path: Path, error: Exception) -> WeightFilesError:
    why = (str(error).splitlines() or [type(error).__name__])[0]
    return WeightFilesError(
        f"{path} is no whole file of torch.save ({why}): it was cut or damaged, or is in the format before "
        "torch 1.6, which cannot be mapped; load it with torch.load, and save its weights with "
        "safetensors.torch.save_file"
    )


def _describe(held: object) -> str:
    if not isinstance(held, Mapping):
        return f"a {type(held).__name__}"
    others = [
        f"{name!r} ({type(value).__name__})" for name, value in held.items() if not isinstance(value, Tensor)
    ]
    return (
        f"values that are not tensors, {', '.join(others[:_NUM_SHOWN])}"
        if others
        else "names that are not strings"
    )


def _allow(arrays: bool) -> AbstractContextManager[object]:
    """Return a context in which torch also unpickles NumPy arrays of numbers, if `arrays` is True."""
    if not arrays:
        return nullcontext()
    try:
        import numpy
    except ImportError:
        return nullcontext()
    multiarray: Any = numpy.zeros(0).__reduce__()[0]
    number_types: list[Any] = [type(numpy.dtype(code)) for code in numpy.typecodes["AllInteger"] + "?efd"]
    allowed: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
        multiarray, (multiarray, _EARLIER_NAME), numpy.ndarray, numpy.dtype, *set(number_types)
    ]  # fmt: skip
    return safe_globals(allowed)
