"""The private names of torch that this package uses, in one place; the same in torch 2.9 to 2.15."""

from collections.abc import Collection, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeAlias

import torch.distributed as dist
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
    unset_fake_temporarily,
)
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_leaves as tree_leaves

# The parameters of `__torch_dispatch__`, which torch leaves untyped.
Types: TypeAlias = Collection[type]
Args: TypeAlias = tuple[Any, ...]
Kwargs: TypeAlias = Mapping[str, Any] | None

# The entries of a module's `__dict__` that hold its parameters and its buffers, by name.
PARAMETERS = "_parameters"
BUFFERS = "_buffers"
# What an operation on tensors of a FakeTensorMode raises if its result depends on their values.
DATA_DEPENDENT_ERRORS = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)


def without_fake_mode() -> AbstractContextManager[object]:
    """Return a context in which operations make tensors with values."""
    return unset_fake_temporarily()


@contextmanager
def fake_ranks(world_size: int) -> Generator[None]:
    """Let this process be rank 0 of `world_size` ranks that do not exist: collectives return without data."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
