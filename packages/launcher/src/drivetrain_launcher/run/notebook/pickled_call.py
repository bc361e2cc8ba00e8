"""Pickle calls to ranks and their results: objects that only the notebook knows by value, tensors through the CPU.

`cloudpickle` ships what pickle cannot: functions and classes of cells, lambdas, nested functions. A call also
carries the source of code that is in no file, for tracebacks; and the names of its objects in `__main__`, since the
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
from typing import IO, Any, cast

import cloudpickle

from drivetrain_launcher.errors import LaunchError
from drivetrain_launcher.run.notebook.rank_channel import new_content
from drivetrain_messages import format_count, format_size

# The size from which a call is reported, as each rank holds a copy.
_LARGE_BYTES = 100 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class PickledCall:
    """A pickled function with its arguments, in a file for any number of ranks, and remarks for the user."""

    content: IO[bytes]
    notes: tuple[str, ...] = ()


class CallPickler(cloudpickle.Pickler):
    """A pickler that moves tensors to the CPU, and records sources and names that a rank needs with the objects.

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
        torch: Any = sys.modules.get("torch")
        if torch is not None and isinstance(obj, torch.Tensor) and obj.device.type not in ("cpu", "meta"):
            self.moved[str(obj.device)] = self.moved.get(str(obj.device), 0) + 1
            moved = obj.detach().cpu()
            if isinstance(obj, torch.nn.Parameter):
                moved = torch.nn.Parameter(moved, requires_grad=False)
            return moved.requires_grad_(obj.requires_grad).__reduce_ex__(5)
        if isinstance(obj, (type, FunctionType)):
            main = sys.modules.get("__main__")
            if obj.__module__ == "__main__" and getattr(main, obj.__qualname__, None) is obj:
                self.main_names[obj.__qualname__] = obj
            if isinstance(obj, FunctionType):
                file = obj.__code__.co_filename
                if file not in self.sources and not Path(file).exists():
                    self.sources[file] = "".join(linecache.getlines(file))
        return super().reducer_override(obj)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


def pack(function: Callable[..., Any], args: Sequence[Any]) -> PickledCall:
    """Pickle a function with its arguments.

    Raises:
        LaunchError: If a part cannot be pickled; the message names the function or the argument.
    """
    name = getattr(function, "__name__", type(function).__name__)
    content = new_content()
    pickler = CallPickler(content)
    # Pickled in this order: by the time the names and sources are reached, the function has filled them.
    try:
        pickler.dump((function, tuple(args), pickler.main_names, pickler.sources))  # pyright: ignore[reportUnknownMemberType]
    except Exception as error:
        content.close()
        roots = ((name, function), *_arguments(args))
        label = next((label for label, value in roots if _measure_shipped(value) is None), name)
        raise LaunchError(
            f"{label}: cannot be sent to each rank "
            f"({_first_line(error)}); create it inside the function: open files, connect and make generators there"
        ) from error
    notes = [
        f"{format_count(count, 'tensor')} of {device} reach{'' if count > 1 else 'es'} the ranks on the CPU"
        for device, count in pickler.moved.items()
    ]
    size = content.tell()
    if size > _LARGE_BYTES:
        parts = (*_arguments(args), *_parts_of(function))
        most, label = max(((_measure_shipped(value) or 0, label) for label, value in parts), default=(0, ""))
        largest = f" ({label}: {format_size(most)})" if label else ""
        notes.append(
            f"{name} and what it uses are {format_size(size)}, which each rank gets a copy of{largest}; load large "
            "data inside the function"
        )
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


def _measure_shipped(value: object) -> int | None:
    """Return the size of a pickled value; None if it cannot be pickled."""
    counter = _Counter()
    try:
        CallPickler(counter).dump(value)  # pyright: ignore[reportUnknownMemberType]
    except Exception:  # noqa: BLE001 - any class may raise anything; the caller reports the first error
        return None
    return counter.size


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]


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
    """Return the names that a function and its nested functions look up."""
    nested = [_names_used(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*nested)
