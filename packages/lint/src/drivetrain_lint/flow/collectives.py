"""The calls that every rank must make."""

import ast
from dataclasses import dataclass

from drivetrain_lint.reading.imports import last_name, word_set, written
from drivetrain_lint.reading.script import Script

# Methods of drivetrain's and Accelerate's Accelerator. `init_trackers`, `log` and `print` may run on one rank.
ACCELERATOR_METHODS = word_set(
    "backward broadcast check_trigger clip_grad_norm_ clip_grad_value_ end_training from_hub gather "
    "gather_for_metrics gathered get_state_dict load_model load_state pad_across_processes prepare push_to_hub "
    "reduce save_if_due save_model save_state wait_for_everyone wait_for_save"
)
_TORCH = word_set(
    "all_gather all_gather_coalesced all_gather_into_tensor all_gather_object all_reduce all_reduce_coalesced "
    "all_to_all all_to_all_single barrier broadcast broadcast_object_list gather gather_object init_process_group "
    "monitored_barrier new_group new_subgroups reduce reduce_scatter reduce_scatter_tensor scatter "
    "scatter_object_list init_device_mesh split_group"
)
_SHARED_FUNCTIONS = word_set(
    "barrier broadcast broadcast_object broadcast_object_list gather gather_object pad_across_processes reduce "
    "scatter synchronize_rng_states wait_for_everyone"
)
_CHECKPOINTS = frozenset({"save", "load", "async_save"})
_STATE_DICTS = word_set(
    "get_model_state_dict get_optimizer_state_dict get_state_dict set_model_state_dict set_optimizer_state_dict "
    "set_state_dict"
)
_MODULES = {
    "torch.distributed": _TORCH,
    "torch.distributed.distributed_c10d": _TORCH,
    "torch.distributed.nn": _TORCH,
    "torch.distributed.nn.functional": _TORCH,
    "torch.distributed.device_mesh": frozenset({"init_device_mesh"}),
    "deepspeed.comm": _TORCH | {"inference_all_reduce", "allgather_fn"},
    "torch.distributed.checkpoint": _CHECKPOINTS,
    "torch.distributed.checkpoint.state_dict": _STATE_DICTS,
    "drivetrain_state": _SHARED_FUNCTIONS,
    "accelerate.utils": _SHARED_FUNCTIONS,
    "accelerate.utils.operations": _SHARED_FUNCTIONS,
    "accelerate.utils.other": _SHARED_FUNCTIONS,
}
_WRAPPERS = frozenset({"DistributedDataParallel", "FullyShardedDataParallel", "fully_shard"})
_STATES = frozenset({"PartialState", "AcceleratorState", "state", "distributed_state", "partial_state"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """A call that every rank must make.

    Attributes:
        shown: The function as the script writes it, such as "accelerator.gather".
        key: The operation; calls with the same key on different ranks meet.
        trains: Whether the call changes weights instead of waiting, such as an optimizer's step.
    """

    node: ast.Call
    shown: str
    key: str
    trains: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveNames:
    """The test of which calls in a script are collectives.

    With `wraps_models`, the script wraps models so that a plain `backward` communicates.
    """

    script: Script
    wraps_models: bool

    def within(self, node: ast.AST) -> bool:
        """Return whether a node contains a collective."""
        return any(self.of(call) is not None for call in self.script.calls(node))

    def of(self, call: ast.Call) -> Collective | None:
        """Return the collective of a call; None for other calls and for calls in a subgroup of the ranks."""
        function = call.func
        name = self.script.name_of(function)
        module, _, last = name.rpartition(".")
        if last in _MODULES.get(module, ()):
            return None if _is_in_subgroup(call) else Collective(node=call, shown=written(function), key=last)
        if not isinstance(function, ast.Attribute):
            return None
        owner, method = function.value, function.attr
        shown = written(function) or f"{ast.unparse(owner)}.{method}"
        if self.script.is_accelerator(owner):
            is_collective = method in ACCELERATOR_METHODS or (
                method == "log"
                and any(each.arg == "reduce" and not _is_none(each.value) for each in call.keywords)
            )
        elif method == "wait_for_everyone":
            state = owner.func if isinstance(owner, ast.Call) else owner
            is_collective = self.script.name_of(state).rpartition(".")[2] in _STATES
        elif not (self.wraps_models or self.script.uses_accelerator):
            return None
        elif method == "step" and names_optimizer(last_name(owner)):
            return Collective(node=call, shown=shown, key=shown, trains=True)
        else:
            is_collective = method == "backward" and "torch.autograd" not in name
        return Collective(node=call, shown=shown, key=method) if is_collective else None


def read_collectives(script: Script) -> CollectiveNames:
    """Return the test of the collectives in a script."""
    names = [script.name_of(call.func) for call in script.calls()]
    wraps = any(name.rpartition(".")[2] in _WRAPPERS or name.endswith(".DDP") for name in names)
    return CollectiveNames(script=script, wraps_models=wraps)


def names_optimizer(name: str) -> bool:
    """Return whether the last part of a dotted name is a name for an optimizer."""
    return "optim" in name.lower() or name.lower() == "opt"


def _is_in_subgroup(call: ast.Call) -> bool:
    """Return whether a call names a process group, to which other ranks need not belong."""
    for keyword in call.keywords:
        if keyword.arg in ("group", "process_group", "pg") and not _is_none(keyword.value):
            return "WORLD" not in ast.unparse(keyword.value)
    names = [last_name(argument).lower() for argument in call.args]
    return any("group" in name or name in ("pg", "mesh") for name in names)


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None
