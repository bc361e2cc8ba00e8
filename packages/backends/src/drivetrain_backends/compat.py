"""The private names of torch's tensors, modules and optimizers that this package uses, in one place.

torch has no public API for these names. They are the same in torch 2.9 to 2.15. tests/backends/test_compat.py and
tests/backends/gradients/test_multi_tensor.py test their behaviour, and docs/design/platforms.md lists the names.
The private names of DDP and FSDP2 are in `ddp.compat` and `fsdp.compat`.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves as tree_leaves

Hooks = dict[int, Callable[[Tensor], Any]]  # torch's own dict, from which a handle removes its hook

# Tensors

# The count of the in-place writes to a tensor. Not a function of Python's: read for all gradients at each step.
version_of: Callable[[Tensor], int] = attrgetter("_version")
# The attribute of a DTensor that holds this rank's shard: read without an operation that autograd records.
LOCAL_SHARD = "_local_tensor"

# In its block, tensors of a subclass are read and called as plain ones, and faster.
as_they_are: Callable[[], AbstractContextManager[None]] = torch._C.DisableTorchFunctionSubclass  # pyright: ignore[reportPrivateUsage]

# One kernel for many tensors on one device: multiply in place by a number or a tensor of shape (), and the norms.
foreach_multiply: Any = torch._foreach_mul_  # pyright: ignore[reportPrivateUsage]
foreach_norm: Any = torch._foreach_norm  # pyright: ignore[reportPrivateUsage]


def foreach_unscale(gradients: list[Tensor], found_inf: Tensor, inverse: Tensor) -> None:
    """Multiply gradients in place by `inverse`, of shape (); write 1.0 to `found_inf` if a gradient is not finite."""
    torch.ops.aten._amp_foreach_non_finite_check_and_unscale_(gradients, found_inf, inverse)


def compilations(since: float) -> list[tuple[float, str | None]]:
    """Return the seconds of each compilation of a forward, and why it was done again, if it was; the last 64 at most.

    Args:
        since: The time of the first, in seconds since the epoch.
    """
    from torch._dynamo.utils import get_compilation_metrics  # a second, where nothing is compiled

    found = [
        one for one in get_compilation_metrics() if one.is_forward and (one.end_time_us or 0) >= since * 1e6
    ]
    return [(one.entire_frame_compile_time_s or 0.0, one.recompile_reason) for one in found]


def call_after_backward(callback: Callable[[], None]) -> None:
    """Have torch call a function at the end of the backward that this thread runs.

    Queued functions run in their order, once every gradient is computed. When its last bucket is full, DDP's reducer
    queues a function that waits for the other ranks. Any thread of autograd may run the functions; the current stream
    is then that of the caller of backward.

    Raises:
        RuntimeError: The thread runs no backward.
    """
    Variable._execution_engine.queue_callback(callback)  # pyright: ignore[reportPrivateUsage]


def values_of_sparse(gradient: Tensor) -> Tensor:
    """Return the nonzero rows of a sparse gradient without a copy, coalesced or not."""
    return gradient._values()


def parameters_with_hooks(parameters: Iterable[Any]) -> list[Any]:
    """Return the parameters with hooks on their gradient or on the gradient's accumulation."""
    # Otherwise reading attributes of a DTensor goes through Python, which takes 8 times as long.
    with as_they_are():
        return [p for p in parameters if p._backward_hooks or p._post_accumulate_grad_hooks]


def names_of_hooks(parameter: Any) -> list[str]:
    """Return the names of the hooks on a parameter, for an error's message."""
    hooks = [
        *(parameter._backward_hooks or {}).values(),
        *(parameter._post_accumulate_grad_hooks or {}).values(),
    ]
    return [getattr(hook, "__qualname__", type(hook).__name__) for hook in hooks]


def take_hooks(parameter: Any) -> tuple[Hooks | None, Hooks | None]:
    """Remove and return a parameter's hooks on its gradient and on the accumulation; None or empty without hooks.

    FSDP2 looks for accumulation hooks on the shard, and finds none after this. Autograd would still run the removed
    hooks, but it gives no gradient to a shard.
    """
    of_gradient, of_parameter = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
    if of_gradient:
        parameter._backward_hooks = None
    if of_parameter:
        parameter._post_accumulate_grad_hooks = None
    return of_gradient, of_parameter


# Modules and optimizers

# The base of every batch normalisation, lazy ones and SyncBatchNorm included.
BatchNorm = _BatchNorm
# The name under which a `torch.compile` wrapper holds the module.
COMPILED_MODULE = "_orig_mod"
# How the names of an optimizer's dicts of hooks begin.
OPTIMIZER_HOOKS = "_optimizer_"
# The operations of torch.ops.aten that F.scaled_dot_product_attention and products of fp8 matrices become.
ATTENTION_AND_FP8 = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_mm",
)


def parameters_in(module: nn.Module) -> dict[str, Any]:
    """Return the dict in which a module keeps its parameters; the dict is live, not a copy."""
    return module._parameters  # pyright: ignore[reportPrivateUsage] 4x faster than the iterators


def modules_in(module: nn.Module) -> dict[str, Any]:
    """Return the dict in which a module keeps its submodules; the dict is live, not a copy."""
    return module._modules  # pyright: ignore[reportPrivateUsage]


def buffers_in(module: nn.Module) -> dict[str, Any]:
    """Return the dict in which a module keeps its buffers; the dict is live, not a copy."""
    return module._buffers  # pyright: ignore[reportPrivateUsage]


def has_load_hooks(module: nn.Module) -> bool:
    """Return whether a module has a hook that changes a state before it is loaded."""
    return bool(module._load_state_dict_pre_hooks)  # pyright: ignore[reportPrivateUsage]


def loads_its_own_way(module: nn.Module) -> bool:
    """Return whether a module itself, not its submodules, loads a state in another way than torch's own layers.

    Torch's own layers differ from each other only for states that lack a name.
    """
    hooks = (module._load_state_dict_pre_hooks, module._load_state_dict_post_hooks)  # pyright: ignore[reportPrivateUsage]
    load = type(module)._load_from_state_dict  # pyright: ignore[reportPrivateUsage]
    return any(hooks) or not load.__module__.startswith("torch.nn.modules.")


def changes_states(optimizer: Optimizer) -> bool:
    """Return whether an optimizer has a hook that changes a state before it is loaded."""
    return bool(getattr(optimizer, "_optimizer_load_state_dict_pre_hooks", ()))


# What a scheduler's state holds of its length, also one made of functions of transformers.
SCHEDULE_LENGTHS = (
    "total_steps",
    "T_max",
    "total_iters",
    "num_training_steps",
    "_schedule_phases",
    "_milestones",
)
# Where it holds the states of its parts.
SCHEDULE_PARTS = ("_schedulers", "lr_lambdas")


def schedulers_in(scheduler: Any) -> Sequence[Any]:
    """Return the schedulers inside a `SequentialLR` or `ChainedScheduler`; none for any other scheduler."""
    return getattr(scheduler, "_schedulers", ())


def milestones_of(scheduler: Any) -> Sequence[int]:
    """Return the steps at which a `SequentialLR` goes on to its next scheduler; none for any other scheduler."""
    return getattr(scheduler, "_milestones", ())


def is_compiler_imported() -> bool:
    """Return whether this process has imported torch's compiler; the import takes seconds."""
    return "torch._dynamo" in sys.modules
