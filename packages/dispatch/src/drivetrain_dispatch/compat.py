"""The private names of torch that this package uses, in one place.

torch has no public API for them. They are the same in torch 2.9 to 2.15. tests/dispatch/test_compat.py tests the
behaviour that is relied on. docs/design/platforms.md lists the names.
"""

import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.autograd import Variable
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_leaves as tree_leaves

# The parameters of `__torch_function__` and `__torch_dispatch__`, which torch leaves untyped.
Types: TypeAlias = Collection[type]
Args: TypeAlias = tuple[Any, ...]
Kwargs: TypeAlias = Mapping[str, Any] | None

# The entries of a module's `__dict__` that hold its parameters and its buffers, by name.
PARAMETERS = "_parameters"
BUFFERS = "_buffers"
# The method of each module that to, cuda, half, ... call, with the function for each tensor as `fn`.
APPLY = "_apply"
# The name of the operation of F.grouped_mm: each expert's rows times its matrix.
GROUPED_PRODUCT = "_grouped_mm"
# The operation that `to` becomes for a new device or dtype.
TO_COPY: Any = torch.ops.aten._to_copy.default
# The function that torch hands to `__torch_function__` when a tensor's `_version` is read.
READ_VERSION: Any = getattr(Tensor, "_version").__get__  # noqa: B009 a descriptor, which types do not know

# What an operation on tensors of a FakeTensorMode raises if its result depends on their values.
DATA_DEPENDENT_ERRORS = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

# A context in which operations on tensors of a subclass run without its `__torch_function__`.
without_torch_function = torch._C.DisableTorchFunctionSubclass  # pyright: ignore[reportPrivateUsage]
# Creates a tensor of a subclass that reports a shape, dtype and device, and has no memory of its own.
make_wrapper = Tensor._make_wrapper_subclass  # pyright: ignore[reportPrivateUsage]


def version_of(tensor: Tensor) -> int:
    """Return torch's count of the in-place writes to a tensor."""
    return tensor._version  # pyright: ignore[reportPrivateUsage]


def call_after_backward(callback: Callable[[], None]) -> None:
    """Have torch call a function at the end of this thread's backward; outside a backward, raise RuntimeError."""
    Variable._execution_engine.queue_callback(callback)  # pyright: ignore[reportPrivateUsage]


def is_write(operation: Any) -> bool:
    """Return whether an operation, as `__torch_dispatch__` gets it, writes to one of its arguments."""
    return operation._schema.is_mutable


def is_compiler_imported() -> bool:
    """Return whether something in this process has imported torch's compiler, which takes seconds."""
    return "torch._dynamo" in sys.modules
