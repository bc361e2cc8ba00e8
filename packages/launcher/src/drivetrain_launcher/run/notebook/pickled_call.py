"""Pickle calls to ranks and results back: by value where only the notebook knows it, tensors by way of the CPU.

`cloudpickle` ships what pickle cannot: functions and classes of cells, lambdas, nested functions. Besides, a call
carries the source of those that are in no file, for tracebacks; and the names that they have in `__main__`, since the
ranks may pickle their instances by name, as `gather_object` does.
"""

import functools
import linecache
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, MethodType
from typing import IO, TYPE_CHECKING, Any, cast

import cloudpickle

from drivetrain_launcher.errors import LaunchError
from drivetrain_launcher.run.notebook.rank_channel import new_content
from drivetrain_messages import format_size

if TYPE_CHECKING:
    from torch import Tensor

# The size from which a call is reported, as each rank holds a copy.
_LARGE_BYTES = 100 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class PickledCall:
    """A function with its arguments, ready to be sent to any number of ranks.

    Attributes:
        content: The file that contains it.
        notes: The lines that tell the user what is special about it.
    """

    content: IO[bytes]
    notes: tuple[str, ...] = ()


class CallPickler(cloudpickle.Pickler):
    """A pickler that moves tensors to the CPU, and notes what a rank needs besides the objects.

    Attributes:
        sources: The source of each file that is only in memory, such as a cell, by name.
        main_names: The functions and classes of `__main__`, by name.
        moved: The number of tensors that were moved from each device.
    """

    def __init__(self, file: "IO[bytes] | _Counter") -> None:
        super().__init__(file, protocol=5)  # pyright: ignore[reportUnknownMemberType]
        self.sources: dict[str, str] = {}
        self.main_names: dict[str, object] = {}
        self.moved: dict[str, int] = {}

    def reducer_override(self, obj: Any) -> Any:
        """Return how `obj` is pickled; pickle calls this for each object."""
        if isinstance(obj, (type, FunctionType)):
            self._note_name(obj)
            if isinstance(obj, FunctionType):
                self._note_source(obj.__code__.co_filename)
        elif (device := _device_of(obj)) is not None:
            self.moved[device] = self.moved.get(device, 0) + 1
            return _on_cpu(obj).__reduce_ex__(5)
        return super().reducer_override(obj)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]

    def _note_name(self, value: Any) -> None:
        main = sys.modules.get("__main__")
        if value.__module__ == "__main__" and getattr(main, value.__qualname__, None) is value:
            self.main_names[value.__qualname__] = value

    def _note_source(self, file: str) -> None:
        if file not in self.sources and not Path(file).exists():
            self.sources[file] = "".join(linecache.getlines(file))


def _device_of(value: object) -> str | None:
    """Return the device of a tensor; None for one on the CPU, and for anything else."""
    if "torch" not in sys.modules:
        return None
    from torch import Tensor

    if not isinstance(value, Tensor) or value.device.type in ("cpu", "meta"):
        return None
    return str(value.device)


def _on_cpu(tensor: "Tensor") -> "Tensor":
    import torch

    moved = tensor.detach().cpu()
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(moved, requires_grad=tensor.requires_grad)
    return moved.requires_grad_(tensor.requires_grad)


def pack(function: Callable[..., Any], args: Sequence[Any]) -> PickledCall:
    """Pickle a function with its arguments.

    Raises:
        LaunchError: If a part cannot be pickled; the message names the function or the argument.
    """
    content = new_content()
    pickler = CallPickler(content)
    # Pickled in this order: by the time the names and sources are reached, the function has filled them.
    try:
        pickler.dump((function, tuple(args), pickler.main_names, pickler.sources))  # pyright: ignore[reportUnknownMemberType]
    except Exception as error:
        content.close()
        roots = ((_name_of(function), function), *_arguments(args))
        label = next((label for label, value in roots if not _is_shippable(value)), _name_of(function))
        raise LaunchError(
            f"{label}: cannot be sent to each rank "
            f"({_first_line(error)}); create it inside the function: open files, connect and make generators there"
        ) from error
    notes = [
        f"{count} tensor{'s' if count > 1 else ''} of {device} reach{'' if count > 1 else 'es'} the ranks on the CPU"
        for device, count in pickler.moved.items()
    ]
    size = content.tell()
    if size > _LARGE_BYTES:
        notes.append(_tell_size(function, args, size))
    return PickledCall(content=content, notes=tuple(notes))


def pack_result(value: object, content: IO[bytes], *, rank: int) -> None:
    """Append a return value to a file.

    Raises:
        LaunchError: If a part cannot be pickled; the message gives the rank.
    """
    begin = content.tell()
    try:
        CallPickler(content).dump(value)  # pyright: ignore[reportUnknownMemberType]
    except Exception as error:
        content.seek(begin)
        raise LaunchError(
            f"the return value of rank {rank}: cannot be sent to the notebook ({_first_line(error)}); return values "
            "that can be pickled, such as tensors, numbers and lists of them"
        ) from error


def unpack(data: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Read a call on a rank; make its sources and names known there.

    Args:
        data: The buffer of the pickled call.
    """
    parts: tuple[Callable[..., Any], tuple[Any, ...], Mapping[str, object], Mapping[str, str]]
    parts = pickle.loads(data)
    function, args, main_names, sources = parts
    vars(sys.modules["__main__"]).update(main_names)
    for file, source in sources.items():
        # Without a time of change, linecache does not look for the file on the disk.
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    return function, args


class _Counter:
    """A file that keeps only the number of bytes written to it."""

    def __init__(self) -> None:
        self.size = 0

    def write(self, data: Any) -> int:
        self.size += memoryview(data).nbytes
        return memoryview(data).nbytes


def _shipped_size(value: object) -> int:
    counter = _Counter()
    CallPickler(counter).dump(value)  # pyright: ignore[reportUnknownMemberType]
    return counter.size


def _is_shippable(value: object) -> bool:
    try:
        _shipped_size(value)
    except Exception:  # noqa: BLE001 - any class may raise anything; the caller reports the first error
        return False
    return True


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def _tell_size(function: Callable[..., Any], args: Sequence[Any], size: int) -> str:
    sizes = [(_shipped_size(value), label) for label, value in (*_arguments(args), *_parts_of(function))]
    most, label = max(sizes, default=(0, ""))
    return (
        f"{_name_of(function)} and what it uses are {format_size(size)}, which each rank gets a copy of"
        + (f" ({label}: {format_size(most)})" if label else "")
        + "; load large data inside the function"
    )


def _arguments(args: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    for place, arg in enumerate(args):
        yield f"argument {place}", arg


def _parts_of(function: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """Yield the objects that are shipped with a function, each with its label."""
    if isinstance(function, functools.partial):
        partial = cast("functools.partial[Any]", function)
        yield "the function of a partial", partial.func
        yield from _arguments(partial.args)
        yield from ((f"argument {key!r}", value) for key, value in partial.keywords.items())
    elif isinstance(function, MethodType):
        yield "self", function.__self__
        yield from _parts_of(function.__func__)
    elif isinstance(function, FunctionType):
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                yield f"closure {name!r}", cell.cell_contents
            except ValueError:  # the cell is still empty
                continue
        for name in sorted(_names_used(function.__code__) & function.__globals__.keys()):
            yield f"global {name!r}", function.__globals__[name]
        yield from ((f"default {place}", value) for place, value in enumerate(function.__defaults__ or ()))
        yield from (
            (f"default of {name!r}", value) for name, value in (function.__kwdefaults__ or {}).items()
        )


def _names_used(code: CodeType) -> set[str]:
    """Return the names that a function and those nested in it look up."""
    nested = [_names_used(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*nested)


def _name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)
