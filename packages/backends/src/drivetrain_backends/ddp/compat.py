"""The private and undocumented names of torch's DistributedDataParallel that this backend uses, in one place.

torch has no public API for these names. They are the same in torch 2.9 to 2.15 unless a function says otherwise.
tests/backends/ddp/test_compat.py tests the behaviour that is relied on; docs/design/platforms.md lists the names.
"""

import re
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel

# The argument that turns the broadcast of buffers on. torch renamed it after 2.11, and warns of the old name.
BUFFERS_ARGUMENT = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in signature(DistributedDataParallel).parameters
    else "broadcast_buffers"
)

# A replica leaves these parameters and buffers of its module out; it keeps the names it found when it was made.
_LEFT_OUT = "_ddp_params_and_buffers_to_ignore"


def applied_arguments(ddp: DistributedDataParallel) -> dict[str, object]:
    """Return the arguments of DDP that the `ddp` section sets, by the names of the settings, with buckets in MiB."""
    return {
        "find_unused_parameters": ddp.find_unused_parameters,
        "static_graph": ddp.static_graph,
        "gradient_as_bucket_view": ddp.gradient_as_bucket_view,
        "broadcast_buffers": getattr(ddp, BUFFERS_ARGUMENT),
        "bucket_size_mb": ddp.bucket_bytes_cap / 2**20,
    }


def communication_hook(ddp: DistributedDataParallel) -> tuple[Callable[..., Any] | None, object]:
    """Return the communication hook and its state; None for both where there is none. DDP takes one, once."""
    return next(iter(ddp._comm_hooks), (None, None))  # pyright: ignore[reportPrivateUsage]


def has_rebuilt_buckets(ddp: DistributedDataParallel) -> bool:
    """Return whether DDP has rebuilt its buckets. DDP does so once, which moves gradients to other tensors."""
    return ddp._has_rebuilt_buckets  # pyright: ignore[reportPrivateUsage]


def accumulators(parameters: Iterable[Tensor]) -> dict[Tensor, object]:
    """Return the autograd nodes that accumulate the gradients of parameters; DDP's reducer hooks into these nodes."""
    return {parameter: get_gradient_edge(parameter).node for parameter in parameters}


def are_attached(parameters: Iterable[Tensor], nodes: Mapping[Tensor, object]) -> bool:
    """Return whether the trainable parameters still have the autograd nodes `nodes`.

    When a parameter's dtype or device changes, torch gives it a new node, without the reducer's hook.
    """
    return all(get_gradient_edge(p).node is nodes[p] for p in parameters if p.requires_grad)


def in_functional_transform() -> bool:
    """Return whether the caller is inside a transform of torch.func, such as jacrev or vmap."""
    return torch._C._functorch.maybe_current_level() is not None  # pyright: ignore


@contextmanager
def leaving_out(module: nn.Module, names: Iterable[str]) -> Generator[None]:
    """Exclude the named parameters of a module from communication by a replica that is made in the block."""
    given: Any = getattr(module, _LEFT_OUT, None)
    setattr(module, _LEFT_OUT, {*(given or ()), *names})
    try:
        yield
    finally:
        if given is None:
            delattr(module, _LEFT_OUT)
        else:
            setattr(module, _LEFT_OUT, given)


def awaits_static_graph(ddp: DistributedDataParallel) -> bool:
    """Return whether DDP has yet to learn a static graph, from a backward of the wrapper's first forward."""
    return ddp.static_graph and not ddp._static_graph_delay_allreduce_enqueued  # pyright: ignore[reportPrivateUsage]


def check_reduced(ddp: DistributedDataParallel) -> None:
    """Have DDP's reducer raise unless its last backward reached every parameter; see `unreduced_parameters`."""
    ddp._check_reducer_finalized()  # pyright: ignore[reportPrivateUsage]


def unreduced_parameters(error: RuntimeError) -> list[int] | None:
    """Return the indices, among the module's trained parameters, of the parameters that got no gradient.

    Return None if `error` has another cause.
    """
    found = re.search(r"did not receive grad for rank \d+: ([\d ,]+)", str(error))
    return None if found is None else [int(index) for index in re.findall(r"\d+", found[1])]
