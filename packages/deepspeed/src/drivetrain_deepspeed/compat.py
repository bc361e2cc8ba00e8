"""The private and undocumented names of DeepSpeed that this backend uses, in one place.

DeepSpeed has no public API for these names. They are those of 0.19. tests/deepspeed/test_compat.py tests the
behaviour that the backend relies on, and docs/design/platforms.md lists the names.

An engine's optimizer has one of four kinds: stage 0 keeps the user's own; stage 1 with bf16 has a kind with flat fp32
gradients; otherwise, stages 1 and 2 have a kind with each rank's part of the gradients; the kind of stage 3 divides
parameters too.
"""

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import getclosurevars
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from drivetrain_backends.compat import as_they_are

_REDUCE_OF_STAGE_3 = "_DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads"
_GRADIENTS_OF_STAGE_3 = "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition"
_PARAMETERS_TO_RELEASE = "_PartitionedParameterCoordinator__params_to_release"

# Parameters


def full_shape(parameter: Any) -> torch.Size:
    """Return the shape of the full parameter, which stage 3 may have divided."""
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))


def num_elements(parameter: Any) -> int:
    """Return the number of elements of the full parameter."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def is_divided(parameter: Any) -> bool:
    """Return whether stage 3 has divided a parameter among the ranks."""
    return hasattr(parameter, "ds_id")


def is_gathered_by_hand(parameter: Any) -> bool:
    """Return whether a parameter is in a block of `zero.GatheredParameters`."""
    return getattr(parameter, "_ds_z3_gathered_param_context_depth", 0) > 0


def call_after_module(init: Any, call: Callable[[nn.Module], None]) -> None:
    """Have `call` run for each module that is built in `zero.Init`, after its parameters are divided."""
    divide = init._post_init_method

    def divide_and_call(module: nn.Module) -> None:
        divide(module)
        call(module)

    init._post_init_method = divide_and_call


def divided_part(parameter: Any) -> Tensor:
    """Return this rank's part of a divided parameter, padded to the same length on all ranks."""
    return parameter.ds_tensor


def part_size(parameter: Any) -> int:
    """Return the number of elements of each rank's part of a divided parameter, with padding, wherever it is kept."""
    return int(parameter.ds_tensor.ds_numel)


def group_of(parameter: Any) -> ProcessGroup:
    """Return the ranks among which a parameter or its master is divided."""
    return parameter.ds_process_group if is_divided(parameter) else parameter._dp_group


def has_master(parameter: Any) -> bool:
    """Return whether ZeRO keeps a partitioned fp32 master: if the parameter was trained when the engine was made."""
    if (optimizer := getattr(parameter, "_z3_optimizer", None)) is not None:  # frozen ones have it too
        return optimizer.get_param_id(parameter) in optimizer.grad_position
    return hasattr(parameter, "_hp_mapping")


def master_fragment(parameter: Any, key: str | None) -> tuple[int, Tensor] | None:
    """Return the start and the elements of this rank's part of a master, or of the state `key` (stages 1 and 2).

    Return None if this rank's partition holds no element of the parameter.
    """
    mapping = parameter._hp_mapping
    return None if mapping is None else (mapping.lp_fragment_address.start, mapping.get_hp_fragment(key))


# Engines


def call_before_backward(engine: Any, call: Callable[[], None]) -> None:
    """Have `call` run whenever a backward begins, before the engine does any work or raises an error."""
    _call_before(engine, "_backward_prologue", call)


def read_as_they_are(engine: Any) -> None:
    """Let an engine of stage 3 see empty parameters as plain tensors when it saves, loads and drops gradients."""

    def as_is(call: Callable[..., Any]) -> Callable[..., Any]:
        def call_as_is(*args: Any, **kwargs: Any) -> Any:
            with as_they_are():
                return call(*args, **kwargs)

        return call_as_is

    engine.module_state_dict = as_is(engine.module_state_dict)
    engine.load_module_state_dict = as_is(engine.load_module_state_dict)
    engine.optimizer.zero_grad = as_is(engine.optimizer.zero_grad)


def applied_zero(engine: Any) -> Any:
    """Return the ZeRO section of the configuration that an engine applies."""
    return engine._config.zero_config


def accumulation_dtype(engine: Any) -> str | None:
    """Return the name of the dtype in which an engine accumulates gradients."""
    return engine._config.grad_accum_dtype


def close_window(engine: Any) -> None:
    """Make an engine's gradients ready for its step, as at the end of a backward that closes a window."""
    engine.set_gradient_accumulation_boundary(True)
    if engine.zero_optimization_partition_gradients():  # stages 2 and 3 have reduced them in backward
        engine.optimizer.finalize_gradient_accumulation_boundary()
    else:
        engine.allreduce_gradients()


def offloads_gradients(engine: Any) -> bool:
    """Return whether an engine moves gradients to the host or a drive, in the backward that closes a window."""
    return engine.zero_cpu_offload() or engine.zero_nvme_offload_optimizer()


@contextmanager
def floating_first(model: nn.Module) -> Generator[None]:
    """Have a model list its floating-point parameters first in the block; a stage 3 engine is made in the block.

    Stage 3 takes the dtype of the first parameter for the model's, and refuses the integers of a packed weight.
    """
    listed = model.parameters

    def parameters(recurse: bool = True) -> Iterator[nn.Parameter]:
        return iter(sorted(listed(recurse), key=lambda p: not p.is_floating_point()))

    vars(model)["parameters"] = parameters
    try:
        yield
    finally:
        del vars(model)["parameters"]


def can_cut(model: nn.Module) -> bool:
    """Return whether automatic tensor parallelism knows where to cut a model, whose forward may yet fail."""
    from deepspeed.module_inject.auto_tp import AutoTP

    parse: Any = AutoTP.tp_parser  # a function of a model
    try:
        return bool(parse(model))
    except AssertionError:  # as which it tells that it does not
        return False


def release_models(models: Iterable[nn.Module]) -> None:
    """Remove the models of ended engines from DeepSpeed's globals; stage 3 leaves a model in two globals."""
    from deepspeed.runtime.zero import parameter_offload

    module: Any = parameter_offload
    ended = {part for model in models for part in model.modules()}
    module.FWD_MODULE_STACK[:] = [part for part in module.FWD_MODULE_STACK if part not in ended]
    # Results of a method by engine and module, kept by a cache below a decorator that does not show it.
    cached = getattr(module.PartitionedParameterCoordinator, _PARAMETERS_TO_RELEASE)
    getclosurevars(cached).nonlocals["func"].cache_clear()


def restore_linear() -> None:
    """Restore torch's `linear`. DeepSpeed 0.19 replaces it for the whole process and never restores it.

    DeepSpeed's version multiplies by other operations, so that tensor subclasses and observers see other calls. If an
    engine of stage 3 still trains, torch's `linear` gives the same values, but needs more memory.
    """
    from deepspeed.runtime.zero.partition_parameters import InsertPostInitMethodToModuleSubClasses as Patches

    before = getattr(Patches, "linear_bk", None)
    if before is not None:
        torch.nn.functional.linear = before


def drop_ended_groups() -> None:
    """Make DeepSpeed recreate process groups that have ended: it keeps them after their destruction."""
    from deepspeed.utils import groups

    module: Any = groups
    if module._WORLD_GROUP is not None:
        try:
            dist.get_process_group_ranks(module._WORLD_GROUP)
        except KeyError:  # it was destroyed
            module._release_process_group_references()


# Masters


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatGroups:
    """The flat tensors of stages 1 and 2, by parameter group."""

    parameters: list[list[nn.Parameter]]  # views of the flat tensor of their group
    parts: list[list[Tensor]]  # of that tensor, one for each rank
    masters: list[Tensor]  # the fp32 master of this rank's part
    ranks: list[ProcessGroup]  # the process groups of the parts


def flat_groups(optimizer: Any) -> FlatGroups:
    """Return the flat tensors of an optimizer of stage 1 or 2."""
    if adds_up_flat(optimizer):
        parameters, parts = optimizer.bf16_groups, optimizer.bf16_partitioned_groups
        masters = optimizer.fp32_groups_flat_partition
    else:
        parameters, parts = optimizer.bit16_groups, optimizer.parallel_partitioned_bit16_groups
        masters = optimizer.single_partition_of_fp32_groups
    return FlatGroups(
        parameters=parameters, parts=parts, masters=masters, ranks=optimizer.real_dp_process_group
    )


def master_of(optimizer: Any, index: int, parameter: Tensor) -> Tensor:
    """Return this rank's flat master for a parameter's group, even if no element in it is the parameter's."""
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):  # stage 3 splits a group into several
        place, *_ = optimizer.grad_position[optimizer.get_param_id(parameter)]
        return optimizer.fp32_partitioned_groups_flat[place]
    return flat_groups(optimizer).masters[index]


def link_states(optimizer: Any) -> None:
    """Make stages 1 and 2 find each parameter's part of the optimizer state.

    DeepSpeed looks for the parts once, after the first group's step, when the other groups have no state yet.
    """
    if hasattr(optimizer, "_lazy_init_hp_params_optimizer_state"):
        optimizer._hp_optimizer_states_linked = False
        if optimizer.optimizer.state:
            optimizer._lazy_init_hp_params_optimizer_state()


def adds_up_flat(optimizer: Any) -> bool:
    """Return whether an optimizer is of stage 1 with bf16, which accumulates gradients in flat fp32 buffers."""
    return hasattr(optimizer, "fp32_groups_gradients_flat")


def flat_gradients(optimizer: Any) -> list[Tensor]:
    """Return the flat fp32 gradients of stage 1 with bf16."""
    return optimizer.fp32_groups_gradients_flat


def global_norm(optimizer: Any) -> Tensor:
    """Return the global 2-norm of an optimizer's gradients before any unscaling; -1 if a gradient is not finite.

    Called on all ranks.
    """
    from deepspeed.runtime.utils import combine_grad_norm_groups, get_global_norm_of_tensors

    if adds_up_flat(optimizer):
        dense, _ = optimizer.get_grads_for_norm()
        return torch.as_tensor(get_global_norm_of_tensors(dense))
    if _is_of_stage_1_or_2(optimizer):
        return torch.as_tensor(optimizer.scaled_global_norm())
    return torch.as_tensor(combine_grad_norm_groups(optimizer._get_norm_groups()))


def clip_at_step(optimizer: Any, max_norm: float) -> None:
    """Have the steps of an optimizer clip gradients to `max_norm` from now on; 0 clips nothing."""
    optimizer.clip_grad = max_norm


def divide_at_step(optimizer: Any, scale: float) -> None:
    """Have the steps of an optimizer of stage 1 to 3 divide gradients by `scale` from now on.

    The optimizer's own scaler may grow its scale between measuring and dividing, which would halve the gradients of
    that step. An external scale does not change there.
    """
    optimizer.custom_loss_scaler = True
    optimizer.external_loss_scale = scale


def can_skip_norm(optimizer: Any) -> bool:
    """Return whether an optimizer measures a norm at its steps that can be turned off, as in stages 1 and 2."""
    return bool(getattr(optimizer, "compute_grad_norm", False))


def measure_at_step(optimizer: Any, is_wanted: bool) -> None:
    """Set whether the steps of stages 1 and 2 measure the norm."""
    optimizer.compute_grad_norm = is_wanted


def drop_gradients(engine: Any) -> None:
    """Drop the gradients of an engine of any stage, including gradients that a failed backward left half reduced."""
    optimizer = engine.optimizer
    if not engine.zero_optimization():
        engine.zero_grad()
        return
    if adds_up_flat(optimizer):
        optimizer.clear_hp_grads()
        optimizer.zero_grad()
        return
    for parameter in engine.module.parameters():
        if parameter.grad is not None and parameter.grad.device.type == "cpu":
            parameter.grad = None  # stage 3's zero_grad needs a stream, which the CPU lacks
    optimizer.zero_grad()
    for bucket in optimizer.ipg_buckets.values():  # left by a backward that failed midway
        getattr(bucket, "clear_params", bucket.clear)()  # stage 3 keeps its buffers
    if _is_of_stage_1_or_2(optimizer):  # as they do after an overflow
        optimizer.micro_step_id = -1  # the value at the start of a window
        for kept in (optimizer.averaged_gradients, optimizer.all_grad_tensors):
            kept.update(dict.fromkeys(kept))
        reduced = optimizer.params_already_reduced
        reduced[:] = [False] * len(reduced)
        optimizer._release_ipg_buffers()


# Reductions


def watch_reductions(
    optimizer: Any, stage: int, *, before: Callable[[], None], last: Callable[[Callable[[], None]], None]
) -> bool:
    """Have `before` run before each reduction of an optimizer of stage 1 to 3, from now on.

    If reductions run during backward, `last` runs in place of the last one of each backward, which is its argument.
    Return whether they do.
    """
    in_backward = not adds_up_flat(optimizer) and (stage > 1 or optimizer.overlap_comm)
    if in_backward:
        reduce_rest = optimizer.independent_gradient_partition_epilogue
        optimizer.independent_gradient_partition_epilogue = lambda: last(reduce_rest)
        method = _REDUCE_OF_STAGE_3 if stage == 3 else "reduce_ipg_grads"
    else:
        method = "get_grads_for_reduction" if adds_up_flat(optimizer) else "reduce_gradients"
    _call_before(optimizer, method, before)
    return in_backward


def backward_of_window(optimizer: Any) -> int:
    """Return the number of the running backward in its window, counted from 0, in stages 2 and 3."""
    return optimizer.micro_step_id


def waiting_parameters(optimizer: Any, stage: int) -> list[Tensor]:
    """Return the parameters whose gradients come into the next reduction, in the order of the reduction."""
    waiting = [parameter for bucket in optimizer.ipg_buckets.values() for parameter in bucket.params]
    return waiting if stage == 3 else [optimizer.bit16_groups[at[0]][at[1]] for at in waiting]


def zero_gradient_of_stage_3(optimizer: Any, parameter: Any) -> None:
    """Zero this rank's part of a gradient of the last window; stage 3 keeps it until a backward replaces it."""
    getattr(optimizer, _GRADIENTS_OF_STAGE_3)[parameter.ds_id].zero_()


def parameters_without_gradient(optimizer: Any, parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the parameters for which stage 1 holds no gradient: no backward of this rank reached them."""
    if adds_up_flat(optimizer):
        groups = zip(optimizer.bf16_groups, optimizer.fp32_groups_has_gradients, strict=True)
        return [p for group, flags in groups for p, has in zip(group, flags, strict=True) if not has]
    return [p for p in parameters if optimizer.get_gradient_for_reduction(p) is None]


def fill_gradients(optimizer: Any, parameters: Iterable[Any]) -> None:
    """Give stage 1 zeros as the gradients of the parameters without one; in bf16 they only lack in its norm."""
    if adds_up_flat(optimizer):
        for flags in optimizer.fp32_groups_has_gradients:
            flags[:] = [True] * len(flags)
        return
    for parameter in parameters:
        if optimizer.use_grad_accum_attribute:
            parameter.grad_accum = torch.zeros_like(parameter, dtype=optimizer.gradient_accumulation_dtype)
        else:
            parameter.grad = torch.zeros_like(parameter)


def _is_of_stage_1_or_2(optimizer: Any) -> bool:
    return hasattr(optimizer, "scaled_global_norm")


def _call_before(owner: Any, method: str, call: Callable[[], None]) -> None:
    run = getattr(owner, method)

    def call_and_run(*args: Any, **kwargs: Any) -> Any:
        call()
        return run(*args, **kwargs)

    setattr(owner, method, call_and_run)
