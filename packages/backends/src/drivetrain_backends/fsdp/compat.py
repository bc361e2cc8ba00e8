"""The private names of torch's FSDP2 that this backend uses, in one place.

torch has no public API for these names. They are the same in torch 2.9 to 2.15 unless a function says otherwise.
tests/backends/fsdp/test_compat.py tests the behaviour that is relied on; docs/design/platforms.md lists the names.
"""

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_common import (  # pyright: ignore[reportMissingTypeStubs]
    FSDPMeshInfo,
    HSDPMeshInfo,
    TrainingState,
)
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves as tree_leaves  # FSDP finds the tensors of outputs by it
from torch.utils._pytree import tree_map_only as tree_map_only

# torch 2.9 runs the operations of DTensors in Python, and asserts there that a view is of its base's class.
ASSERTS_ONE_CLASS = torch.__version__ < "2.10"  # compares as versions do, not as text


def run_as_dtensors(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """Run an operation on instances of a DTensor subclass as on plain DTensors; views of them are plain too."""
    del cls
    own = [each for each in tree_leaves((args, kwargs)) if isinstance(each, DTensor)]
    classes = [type(each) for each in own]
    for each in own:
        each.__class__ = DTensor
    try:
        return DTensor.__torch_dispatch__(func, types, args, kwargs or {})
    finally:
        for each, before in zip(own, classes, strict=True):
            each.__class__ = before


def compiled_key(parameter: Any) -> str:
    """Return a DTensor's part of the key of a compiled function on disk; only torch 2.15 and later ask for it."""
    return getattr(DTensor, "_stable_hash_for_caching", repr)(parameter)


def state_of(block: FSDPModule) -> Any:
    """Return the state that `fully_shard` keeps for a block."""
    return block._get_fsdp_state()  # pyright: ignore[reportPrivateUsage]


def parameter_groups(block: FSDPModule) -> list[Any]:
    """Return the groups of parameters that a block gathers; none if all its parameters belong to inner blocks."""
    state = state_of(block)
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # before torch 2.12: one group or none
        groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
    return list(groups)


def sharded_parameters(block: FSDPModule) -> Iterator[Any]:
    """Yield torch's own object for each sharded parameter of a block; its `sharded_param` is the DTensor."""
    for group in parameter_groups(block):
        yield from group.fsdp_params


def gathered_parameter(parameter: Any) -> nn.Parameter | None:
    """Return the full parameter that FSDP puts into the module; None before its first gather.

    From its first gather on, the full parameter stays the same object. It has no memory while it is sharded.
    """
    return getattr(parameter, "_unsharded_param", None)


def holds_full_gradient(parameter: Any) -> bool:
    """Return whether an unreduced backward left a full gradient."""
    gathered = gathered_parameter(parameter)
    return _find_apart_gradient(parameter) is not None or (gathered is not None and gathered.grad is not None)


def drop_full_gradient(parameter: Any) -> None:
    """Drop the full gradient that an unreduced backward left."""
    if _find_apart_gradient(parameter) is not None:
        parameter.unsharded_accumulated_grad = None
    if (gathered := gathered_parameter(parameter)) is not None:
        gathered.grad = None


def gather_as(parameter: Any, form: Callable[[Tensor], Tensor]) -> None:
    """Change the form of a parameter's shard, and reset the parameter as before its first gather.

    `form` gets the shard and returns a tensor with the same values and storage. The parameter must be sharded now.
    """
    parameter.sharded_param._local_tensor = form(parameter.sharded_param._local_tensor)
    parameter._sharded_param_data = form(parameter._sharded_param_data)  # flat, with padding
    parameter.all_gather_outputs, parameter._unsharded_inner_tensors = [], []
    if hasattr(parameter, "_unsharded_param"):  # not before the first gather
        del parameter._unsharded_param


def module_slot(parameter: Any) -> tuple[dict[str, Any], str]:
    """Return the module's dict in which FSDP swaps shard and full parameter, and the parameter's key in it."""
    info = parameter._module_info
    return info.module._parameters, info.param_name


def backward_is_open(block: FSDPModule) -> bool:
    """Return whether a backward has begun but not ended; True also after a backward that raised an error."""
    return state_of(block)._state_ctx.post_backward_final_callback_queued


def forward_is_open(block: FSDPModule) -> bool:
    """Return whether a forward of the root has begun but not ended."""
    return state_of(block)._state_ctx.iter_forward_root is not None


def begin_anew(block: FSDPModule) -> None:
    """Reset a block after a refused forward, so that the next forward starts like the first."""
    state = state_of(block)
    state._training_state = TrainingState.IDLE
    state._state_ctx.iter_forward_root = None
    for group in parameter_groups(block):
        group._training_state = TrainingState.IDLE


def check_before_gathering(group: Any, check: Callable[[], None]) -> None:
    """Have `check` called before a group gathers its parameters, from now on."""
    unshard = group.unshard

    def check_and_unshard(*args: Any, **kwargs: Any) -> Any:
        if group.is_sharded and group._all_gather_result is None:
            check()
        return unshard(*args, **kwargs)

    group.unshard = check_and_unshard


def call_after_gathering(group: Any, act: Callable[[], None]) -> None:
    """Have `act` called after a group has gathered its parameters, from now on."""
    wait = group.wait_for_unshard

    def wait_and_act() -> None:
        was_sharded = group.is_sharded
        wait()
        if was_sharded and group.is_unsharded:
            act()

    group.wait_for_unshard = wait_and_act


def is_in_forward(group: Any) -> bool:
    """Return whether a group is gathered for a forward rather than for a backward."""
    return group._training_state == TrainingState.FORWARD


def check_before_first_forward(block: FSDPModule, check: Callable[[], None]) -> None:
    """Have `check` called before FSDP reads dtypes and shapes from the modules, at the first forward."""
    state = state_of(block)
    begin = state._lazy_init

    def check_and_begin() -> None:
        if state._is_root is None:
            check()
        begin()

    state._lazy_init = check_and_begin


def check_before_backward(block: FSDPModule, check: Callable[[], None]) -> None:
    """Have `check` called when the backward reaches a block's outputs, from now on."""
    state = state_of(block)
    begin = state._pre_backward

    def check_and_begin(gradient: Tensor) -> Tensor:
        check()
        return begin(gradient)

    state._pre_backward = check_and_begin


def wrap_collectives(group: Any, gather: Callable[[Any], Any], reduce: Callable[[Any], Any]) -> None:
    """Wrap the objects that run a group's all-gather and reduce-scatter by calling `gather` and `reduce` on them."""
    group._all_gather_comm = gather(group._all_gather_comm)
    group._reduce_scatter_comm = reduce(group._reduce_scatter_comm)


def num_prefetched(block: FSDPModule) -> int:
    """Return the number of blocks gathered ahead of their forward, as set by `set_modules_to_forward_prefetch`."""
    return len(state_of(block)._states_to_forward_prefetch)


def mixed_precision(block: FSDPModule) -> MixedPrecisionPolicy:
    """Return the mixed precision policy of a block."""
    return state_of(block)._mp_policy


def reshards_after_forward(group: Any) -> bool:
    """Return whether a group releases its gathered parameters after the forward."""
    return bool(group._reshard_after_forward)


def replica_ranks(group: Any) -> tuple[int, ...]:
    """Return the ranks that hold the same shards of a group's parameters, this one among them."""
    if not isinstance(group.mesh_info, HSDPMeshInfo):
        return (dist.get_rank(),)
    return tuple(dist.get_process_group_ranks(group.mesh_info.replicate_process_group))


@contextmanager
def reduced_in_replica(group: Any) -> Generator[None]:
    """Have a group's gradients reduced over the shards of one replica alone in the block."""
    before, after = group.mesh_info, group.post_forward_mesh_info
    own = copy(before)
    own.__class__ = FSDPMeshInfo  # which knows no replicas
    group.mesh_info, group.post_forward_mesh_info = own, own if after is before else after
    try:
        yield
    finally:
        group.mesh_info, group.post_forward_mesh_info = before, after


def needs_gradient_dtypes(group: Any) -> bool:
    """Return whether this torch, like 2.9, reads a group's gradient dtypes only at the group's first forward."""
    return "_orig_dtype" in type(group).__annotations__


def give_gradient_dtypes(group: Any) -> bool:
    """Set the gradient dtypes of a group without a trainable parameter at its first forward; False before that."""
    if not hasattr(group, "_orig_dtype"):
        return False
    if group._orig_dtype is None:
        group._orig_dtype = group.fsdp_params[0].orig_dtype
        group._reduce_dtype = group.fsdp_params[0].reduce_dtype
    return True


def _find_apart_gradient(parameter: Any) -> Tensor | None:
    """Return the gradient that older torch accumulates outside the gathered parameter.

    In 2.15, the attribute is a property without a setter and returns the gathered parameter's own gradient.
    """
    return vars(parameter).get("unsharded_accumulated_grad")
