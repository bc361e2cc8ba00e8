"""The lazy tensors of a conversion: they record operations and run them on demand.

A conversion written for ordinary tensors (split, stack, transpose, dequantise) is applied to `LazyTensor`s before any
file is read. A result knows its shape and its stored tensors. The tensors of a join are read directly into their
parts of the result.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor

from drivetrain_dispatch.compat import Args, Kwargs, Types, without_torch_function
from drivetrain_dispatch.model.nested_values import map_tensors, tensors_in
from drivetrain_weights import Box, MappedFile

_PIECE_BYTES = 8 << 20
# Operations that change only the dims of a tensor, so that each part of the result is a part of the input.
_RESHAPES = frozenset({Tensor.reshape, Tensor.view, Tensor.flatten, Tensor.unflatten, torch.flatten})
_TRANSPOSES = frozenset({Tensor.transpose, torch.transpose, Tensor.swapaxes})
_STACKS = frozenset({torch.stack})
_CONCATENATIONS = frozenset({torch.cat, torch.concat, torch.concatenate})
_JOINS = _STACKS | _CONCATENATIONS


class TensorInFile(NamedTuple):
    """A tensor that is stored in a file."""

    file: MappedFile
    name: str


class Operation(NamedTuple):
    """A recorded call that makes a tensor from other tensors."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    position: int | None  # the index of the tensor in the function's result; None if the result is a tensor


Origin: TypeAlias = TensorInFile | Operation


class LazyTensor(Tensor):
    """A tensor on the meta device that records how to make its values."""

    origin: Origin

    @classmethod
    def in_file(cls, file: MappedFile, name: str) -> "LazyTensor":
        """Create the lazy tensor of a tensor in a file."""
        held = file.tensor(name)
        return _lazy(torch.empty_like(held, device="meta"), TensorInFile(file, name))

    @classmethod
    def made_by(cls, func: Callable[..., Any], *args: Any, **kwargs: Any) -> "LazyTensor":
        """Create the lazy result of a function, which runs now on the meta device and later on values."""
        return _lazy(func(*_map(args, _plain), **_map(kwargs, _plain)), Operation(func, args, kwargs, None))

    @classmethod
    def computed(cls, like: Tensor, compute: Callable[[], Tensor]) -> "LazyTensor":
        """Create the lazy tensor of values that `compute` returns, of the shape and dtype of `like`."""
        return _lazy(torch.empty_like(like, device="meta"), Operation(compute, (), {}, None))

    @classmethod
    def __torch_function__(cls, func: Any, types: Types, args: Args = (), kwargs: Kwargs = None) -> Any:  # type: ignore[override] torch leaves it untyped
        """Apply an operation on the meta device, and record it."""
        given = kwargs or {}
        with without_torch_function():
            result = func(*_map(args, _plain), **_map(given, _plain))
            if isinstance(result, Tensor):
                return _lazy(result, Operation(func, args, given, None))
            if isinstance(result, (tuple, list)) and any(isinstance(part, Tensor) for part in result):
                return type(result)(
                    _lazy(part, Operation(func, args, given, index)) for index, part in enumerate(result)
                )
        return result

    def values(self) -> Tensor:
        """Compute the values on the host; a stored tensor and views of it are the file's pages."""
        if isinstance(self.origin, TensorInFile):
            return self.origin.file.tensor(self.origin.name)
        func, args, kwargs, index = self.origin
        result = func(*_map(args, LazyTensor.values), **_map(kwargs, LazyTensor.values))
        return result if index is None else result[index]

    def read_into(self, target: Tensor) -> None:
        """Read the values into a tensor of any device, dtype and strides, one of the joined tensors at a time."""
        parts = sorted(self.parts(target), key=lambda pair: pair[0].position())
        buffer: Tensor | None = None
        for lazy, part in parts:
            if isinstance(lazy.origin, TensorInFile) and part.is_contiguous():
                buffer = torch.empty(_PIECE_BYTES, dtype=torch.uint8) if buffer is None else buffer
                file, name = lazy.origin
                flat, size = part.view(-1), part.numel()
                is_divisible = file.divisible(name)
                step = _PIECE_BYTES // file.tensor(name).element_size() if is_divisible else max(1, size)
                for start in range(0, size, step):
                    file.copy(name, flat[start : start + step], start=start, buffer=buffer)
            else:
                part.copy_(lazy.values())

    def divisible(self) -> bool:
        """Return whether the tensor can be read piece by piece: only if a file stores it unconverted."""
        return isinstance(self.origin, TensorInFile) and self.origin.file.divisible(self.origin.name)

    def read_piece(self, target: Tensor, *, start: int, buffer: Tensor) -> None:
        """Read elements from `start` on into contiguous memory; a tensor that is not divisible is read as a whole."""
        if isinstance(self.origin, TensorInFile):
            self.origin.file.copy(self.origin.name, target, start=start, buffer=buffer)
        else:
            self.read_into(target.view(self.shape))

    def read_box(self, target: Tensor, box: Box) -> None:
        """Read a part of the tensor."""
        target.copy_(self.values()[box.slices()])

    def expect(self, *, start: int, size_bytes: int) -> None:
        """Ask the system to read ahead elements from `start` on; all elements if the tensor is converted."""
        if isinstance(self.origin, TensorInFile):
            self.origin.file.expect(self.origin.name, start=start, size_bytes=size_bytes)
            return
        for file, name in self.inputs():
            file.expect(name, start=0, size_bytes=file.tensor(name).nbytes)

    def mapped_file(self) -> MappedFile | None:
        """Return the file whose pages are the values; None if the values have to be computed or copied."""
        inputs = list(self._lazy_inputs())
        if isinstance(self.origin, Operation):
            # Torch keeps one Python object per storage: a view shares it, a copy does not.
            own = _plain(self)
            if len(inputs) != 1 or own.untyped_storage() is not _plain(inputs[0]).untyped_storage():
                return None
            if not own.is_contiguous():
                return None
        return next(iter(self.files()))

    def files(self) -> dict[MappedFile, None]:
        """Return the files that the values are read from, each once."""
        return {found.file: None for found in self.inputs()}

    def position(self) -> tuple[str, int]:
        """Return the path of the first file to read and the offset in it, for sorting reads in file order."""
        places = ((str(found.file.path), found.file.start_of(found.name) or 0) for found in self.inputs())
        return min(places, default=("", 0))

    def recipe(self) -> str:
        """Describe how the values are made; the strings of equal operations on the same files are equal."""
        if isinstance(self.origin, TensorInFile):
            file, name = self.origin
            return f"{file.path}@{file.stamp()}:{name}"
        func, args, kwargs, index = self.origin
        name = getattr(func, "__qualname__", type(func).__name__)
        shown = _map((*args, *sorted(kwargs.items())), LazyTensor.recipe)
        return f"{getattr(func, '__module__', '')}.{name}{shown!r}[{index}]"

    def inputs(self) -> Iterator[TensorInFile]:
        """Yield the stored tensors that the values are made from."""
        for lazy in self._lazy_inputs():
            if isinstance(lazy.origin, TensorInFile):
                yield lazy.origin

    def _lazy_inputs(self) -> Iterator["LazyTensor"]:
        """Yield a lazy tensor for each stored tensor that this tensor is made from."""
        if isinstance(self.origin, TensorInFile):
            yield self
        else:
            for tensor in tensors_in((self.origin.args, self.origin.kwargs)):
                if isinstance(tensor, LazyTensor):
                    yield from tensor._lazy_inputs()

    def parts(self, target: Tensor) -> Iterator[tuple["LazyTensor", Tensor]]:
        """Undo a join: yield each joined tensor with the part of the target that it fills."""
        # An operation on a join that only reorders elements is undone on the target; any other is computed in full.
        if isinstance(self.origin, Operation) and self.origin.position is None:
            func, args, kwargs, _ = self.origin
            if func in _JOINS:
                tensors = args[0] if args else kwargs["tensors"]
                dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
                start = 0
                for index, tensor in enumerate(cast("Iterable[LazyTensor]", tensors)):
                    if func in _STACKS:
                        part = target.select(dim, index)
                    else:
                        part = target.narrow(dim, start, tensor.shape[dim])
                        start += tensor.shape[dim]
                    yield from tensor.parts(part)
                return
            inner = args[0] if args else None
            undone = None
            if isinstance(inner, LazyTensor) and inner._is_joined():
                undone = _undo(func, args[1:], kwargs, inner, target)
            if isinstance(inner, LazyTensor) and undone is not None:
                yield from inner.parts(undone)
                return
        yield self, target

    def _is_joined(self) -> bool:
        """Return whether this tensor is joined from several tensors, possibly reordered afterwards."""
        if isinstance(self.origin, TensorInFile) or self.origin.position is not None:
            return False
        if self.origin.func in _JOINS:
            return True
        inner = self.origin.args[0] if self.origin.args else None
        return isinstance(inner, LazyTensor) and inner._is_joined()


def _undo(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], inner: Tensor, target: Tensor
) -> Tensor | None:
    """Return the view of the target with the shape of an operation's input; None if no view has this shape."""
    if func is Tensor.contiguous:
        return target
    if func in _TRANSPOSES:
        return target.transpose(*args, **kwargs)
    if func in _RESHAPES:
        try:
            return target.view(inner.shape)
        except RuntimeError:  # the target's strides allow no such view
            return None
    return None


def _lazy(meta: Tensor, origin: Origin) -> LazyTensor:
    lazy = meta.as_subclass(LazyTensor)
    lazy.origin = origin
    return lazy


def _plain(tensor: Tensor) -> Tensor:
    with without_torch_function():
        return tensor.as_subclass(Tensor)


def _map(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return arguments with `change` applied to every lazy tensor among them."""
    return map_tensors(value, lambda one: change(one) if isinstance(one, LazyTensor) else one)
