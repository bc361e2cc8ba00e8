"""Tensors without values that record the operations applied to them, and run these when the values are needed.

A conversion written for ordinary tensors (split, stack, transpose, dequantise) is applied to `LazyTensor`s before a
file is read. It then tells the shape of each result, the tensors of files that it needs, and, for results that are
joined from several tensors, which part of the result each of them fills: they are read straight to their place.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor

from drivetrain_dispatch.files.weight_files import MappedFile

_PIECE_BYTES = 8 << 20
# Operations that only change the dims of a tensor: a part of their result is the same part of what they are given.
_RESHAPES = frozenset({Tensor.reshape, Tensor.view, Tensor.flatten, Tensor.unflatten, torch.flatten})
_TRANSPOSES = frozenset({Tensor.transpose, torch.transpose, Tensor.swapaxes})
_STACKS = frozenset({torch.stack})
_CONCATENATIONS = frozenset({torch.cat, torch.concat, torch.concatenate})
_JOINS = _STACKS | _CONCATENATIONS


class TensorInFile(NamedTuple):
    """A tensor of a file.

    Attributes:
        file: The file.
        name: Its name there.
    """

    file: MappedFile
    name: str


class Operation(NamedTuple):
    """A call that makes a tensor of others.

    Attributes:
        func: The function that is called.
        args: Its arguments, with lazy tensors among them.
        kwargs: Its keyword arguments.
        position: The position of the tensor in what the function returns; None if it returns a tensor.
    """

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    position: int | None


Origin: TypeAlias = TensorInFile | Operation


class LazyTensor(Tensor):
    """A tensor on the meta device that knows how its values are made.

    Attributes:
        origin: The file that holds it, or the operation that makes it.
    """

    origin: Origin

    @classmethod
    def in_file(cls, file: MappedFile, name: str) -> "LazyTensor":
        """Create the lazy tensor of a tensor in a file."""
        held = file.tensor(name)
        return _lazy(torch.empty_like(held, device="meta"), TensorInFile(file, name))

    @classmethod
    def made_by(cls, func: Callable[..., Any], *args: Any, **kwargs: Any) -> "LazyTensor":
        """Create the lazy tensor that a function makes of lazy tensors, among other arguments.

        Args:
            func: Returns a tensor. It is called twice: now with tensors on the meta device, later with values.
            args: Its arguments.
            kwargs: Its keyword arguments.
        """
        return _lazy(func(*_map(args, _plain), **_map(kwargs, _plain)), Operation(func, args, kwargs, None))

    @classmethod
    def computed(cls, like: Tensor, compute: Callable[[], Tensor]) -> "LazyTensor":
        """Create the lazy tensor of values that are in no file.

        Args:
            like: A tensor of the shape and dtype that they have.
            compute: Returns them.
        """
        return _lazy(torch.empty_like(like, device="meta"), Operation(compute, (), {}, None))

    @classmethod
    def __torch_function__(  # type: ignore[override] torch leaves it untyped
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Apply an operation to shapes alone, and record it."""
        given = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage] torch's documented name
            result = func(*_map(args, _plain), **_map(given, _plain))
            if isinstance(result, Tensor):
                return _lazy(result, Operation(func, args, given, None))
            if isinstance(result, (tuple, list)) and any(isinstance(part, Tensor) for part in result):
                return type(result)(
                    _lazy(part, Operation(func, args, given, index)) for index, part in enumerate(result)
                )
        return result

    def values(self) -> Tensor:
        """Compute the values on the host.

        A tensor of a file is returned as the file's pages, and so are views of one.
        """
        if isinstance(self.origin, TensorInFile):
            return self.origin.file.tensor(self.origin.name)
        func, args, kwargs, index = self.origin
        result = func(*_map(args, LazyTensor.values), **_map(kwargs, LazyTensor.values))
        return result if index is None else result[index]

    def read_into(self, target: Tensor) -> None:
        """Read the values into memory; at most one of the tensors that they are joined from is held beside it.

        Args:
            target: A tensor of the same shape; any device, dtype and strides.

        Raises:
            WeightFilesError: A file ends too early.
        """
        parts = sorted(self.parts(target), key=lambda pair: pair[0].position())
        buffer: Tensor | None = None
        for lazy, part in parts:
            if isinstance(lazy.origin, TensorInFile) and part.is_contiguous():
                buffer = torch.empty(_PIECE_BYTES, dtype=torch.uint8) if buffer is None else buffer
                _read(lazy.origin, part.view(-1), buffer)
            else:
                part.copy_(lazy.values())

    def files(self) -> dict[MappedFile, None]:
        """Return the files that the values are read from, each once."""
        return {found.file: None for found in self.inputs()}

    def position(self) -> tuple[str, int]:
        """Return the path of the first file that is read and where in it, so that reads can go in file order."""
        places = ((str(found.file.path), found.file.start_of(found.name) or 0) for found in self.inputs())
        return min(places, default=("", 0))

    def is_mapped(self) -> bool:
        """Return whether the values are pages of one file: nothing has to be computed, copied or written."""
        if isinstance(self.origin, TensorInFile):
            return True
        inputs = list(self._lazy_inputs())
        if len(inputs) != 1:
            return False
        own, held = _plain(self), _plain(inputs[0])
        # Torch keeps one object for a storage: a view of a tensor has its storage, a copy does not.
        return own.untyped_storage() is held.untyped_storage() and own.is_contiguous()

    def recipe(self) -> str:
        """Describe how the values are made, in a text that is equal for equal recipes over the same files."""
        if isinstance(self.origin, TensorInFile):
            file, name = self.origin
            return f"{file.path}@{file.stamp()}:{name}"
        func, args, kwargs, index = self.origin
        name = getattr(func, "__qualname__", type(func).__name__)
        shown = _map((*args, *sorted(kwargs.items())), LazyTensor.recipe)
        return f"{getattr(func, '__module__', '')}.{name}{shown!r}[{index}]"

    def inputs(self) -> Iterator[TensorInFile]:
        """Yield the tensors of files that the values are made of."""
        for lazy in self._lazy_inputs():
            if isinstance(lazy.origin, TensorInFile):
                yield lazy.origin

    def _lazy_inputs(self) -> Iterator["LazyTensor"]:
        """Yield the tensors of files that this is made of."""
        if isinstance(self.origin, TensorInFile):
            yield self
        else:
            for lazy in _lazy_tensors((self.origin.args, self.origin.kwargs)):
                yield from lazy._lazy_inputs()

    def parts(self, target: Tensor) -> Iterator[tuple["LazyTensor", Tensor]]:
        """Yield what fills each part of the target.

        A join is undone: each of the joined tensors fills a part. An operation around it that only reorders elements
        is undone on the target. Whatever else made the tensor is computed as a whole.
        """
        if isinstance(self.origin, Operation) and self.origin.position is None:
            func, args, kwargs, _ = self.origin
            if func in _JOINS:
                yield from _joined(func, args, kwargs, target)
                return
            inner = args[0] if args else None
            undone = None
            if isinstance(inner, LazyTensor) and inner._joins():
                undone = _undone(func, args[1:], kwargs, inner, target)
            if isinstance(inner, LazyTensor) and undone is not None:
                yield from inner.parts(undone)
                return
        yield self, target

    def _joins(self) -> bool:
        """Return whether it is joined from several tensors, maybe reordered afterwards."""
        if isinstance(self.origin, TensorInFile) or self.origin.position is not None:
            return False
        if self.origin.func in _JOINS:
            return True
        inner = self.origin.args[0] if self.origin.args else None
        return isinstance(inner, LazyTensor) and inner._joins()


def _joined(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], target: Tensor
) -> Iterator[tuple[LazyTensor, Tensor]]:
    """Yield what fills each part of the result of a stack or a concatenation."""
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


def _undone(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], inner: Tensor, target: Tensor
) -> Tensor | None:
    """Return the view of the target that takes what an operation was given; None if there is no such view."""
    if func is Tensor.contiguous:
        return target
    if func in _TRANSPOSES:
        return target.transpose(*args, **kwargs)
    if func in _RESHAPES:
        try:
            return target.view(inner.shape)
        except RuntimeError:  # its elements lie in no order that such a view can have
            return None
    return None


def _read(source: TensorInFile, target: Tensor, buffer: Tensor) -> None:
    """Read a tensor of a file into contiguous memory, piece by piece."""
    file, name = source
    step = (
        _PIECE_BYTES // file.tensor(name).element_size() if file.divisible(name) else max(1, target.numel())
    )
    for start in range(0, target.numel(), step):
        file.copy(name, target[start : start + step], start=start, buffer=buffer)


def _lazy(meta: Tensor, origin: Origin) -> LazyTensor:
    lazy = meta.as_subclass(LazyTensor)
    lazy.origin = origin
    return lazy


def _plain(tensor: LazyTensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage] torch's documented name
        return tensor.as_subclass(Tensor)


def _lazy_tensors(value: Any) -> Iterator[LazyTensor]:
    if isinstance(value, LazyTensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _lazy_tensors(item)
    elif isinstance(value, Mapping):
        yield from _lazy_tensors(list(value.values()))


def _map(value: Any, change: Callable[[LazyTensor], Any]) -> Any:
    """Return arguments with every lazy tensor among them changed."""
    if isinstance(value, LazyTensor):
        return change(value)
    if type(value) in (tuple, list):
        return type(value)(_map(item, change) for item in value)
    if isinstance(value, Mapping):
        return {key: _map(item, change) for key, item in value.items()}
    return value
