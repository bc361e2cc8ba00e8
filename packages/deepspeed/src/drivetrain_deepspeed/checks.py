"""Checks before any change: they refuse what DeepSpeed would train wrongly or fail on with a cryptic error."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from drivetrain_backends.modules.compile import unwrap_compiled
from drivetrain_backends.modules.model_checks import check_no_renormalising, check_not_lazy
from drivetrain_backends.modules.packed_weights import is_wrapper
from drivetrain_backends.optim.parameter_matching import parameter_names
from drivetrain_backends.state_dict.optimizer_state import check_divisible
from drivetrain_deepspeed.compat import full_shape, is_divided
from drivetrain_deepspeed.errors import EngineConfigError
from drivetrain_deepspeed.library import accelerator
from drivetrain_messages import list_some
from drivetrain_precision import Policy, PrecisionError


def check_device(policy: Policy) -> None:
    """Refuse a precision that DeepSpeed does not support on this device, although torch does."""
    device = accelerator()
    able = {"fp16": device.is_fp16_supported(), "bf16": device.is_bf16_supported()}
    if not able.get(policy.mode_beside_recipe, True):
        others = ", ".join(repr(mode) for mode, has in {"no": True, **able}.items() if has)
        raise PrecisionError(
            f"mixed_precision={policy.mode!r}: DeepSpeed does not compute in it on {device.device_name()}; "
            f"it can do {others}"
        )


def check_modules(model: nn.Module, stage: int, num_ranks: int) -> None:
    """Refuse modules that an engine cannot train: wrappers, lazy modules, and modules that write their weights.

    Stage 3 (0.19) reads attributes of the given module that a torch.compile wrapper does not have.
    """
    check_not_lazy(model)
    if stage == 3 or num_ranks > 1:
        check_no_renormalising(
            model, "each rank looks up other rows, so that ranks would train other weights"
        )
    for path, module in model.named_modules():
        name = f"{path} ({type(module).__name__})" if path else type(module).__name__
        if stage == 3 and (inner := unwrap_compiled(module)) is not module:
            raise ValueError(
                f"{path or type(inner).__name__} is wrapped by torch.compile, and stage 3 partitions the module it "
                "was made from: compile that in place, model.compile()"
            )
        if isinstance(
            module, nn.DataParallel | DistributedDataParallel | FullyShardedDataParallel | FSDPModule
        ):
            raise ValueError(
                f"{name} averages or shards by itself what a DeepSpeed engine averages and partitions: prepare() the "
                "module that you wrapped"
            )


def check_optimizer(optimizer: Optimizer, stage: int) -> None:
    """Refuse optimizers that would silently lose state or groups when ZeRO partitions them."""
    name = type(optimizer).__name__
    if stage and isinstance(optimizer, torch.optim.Adagrad):
        raise EngineConfigError(
            f"{name} with deepspeed.stage={stage}: DeepSpeed replaces it by one of its own making, which keeps "
            "neither its groups nor its schedulers; choose another optimizer, or stage 0"
        )
    if stage and optimizer.state:
        raise EngineConfigError(
            f"{name} holds state already, which DeepSpeed drops when it partitions parameters; prepare() it fresh, "
            "and load its state with load_state()"
        )


def check_parameters(
    model: nn.Module, optimizer: Optimizer | None, stage: int, *, is_kept: bool = True
) -> None:
    """Refuse parameters that an engine (0.19) cannot train or hold; with `is_kept`, also several trained dtypes."""
    names = parameter_names({"": model})
    if packed := [name for p, name in names.items() if is_wrapper(p)]:
        raise ValueError(
            f"{list_some(packed)}: packed by torchao, in a class whose weights DeepSpeed can neither move nor send "
            "to other ranks; pack the base by bitsandbytes, or choose backend='ddp' or 'fsdp'"
        )
    _check_layout(model, names, stage)
    trained = {p: name for p, name in names.items() if optimizer is not None and p.requires_grad}
    for parameter, name in names.items():
        shape = tuple(full_shape(parameter))
        if not shape:
            raise ValueError(
                f"{name} is a parameter of shape (), which DeepSpeed cannot send to other ranks; make it one of (1,)"
            )
        if 0 in shape and (stage == 3 or (stage and parameter in trained)):
            raise ValueError(
                f"{name} is a parameter of shape {shape}, without an element, of which DeepSpeed's stage {stage} "
                "cannot give ranks a part; leave it out of the model, or choose stage 0"
            )
    if wide := [name for p, name in trained.items() if p.dtype == torch.float64]:
        raise ValueError(
            f"{list_some(wide)}: of torch.float64, which DeepSpeed does not train in (its masters are float32); "
            "prepare model.float(), with an optimizer built over it, or choose another backend"
        )
    if len(kinds := {p.dtype: name for p, name in trained.items()}) > 1 and is_kept:
        told = ", ".join(f"{name} of {dtype}" for dtype, name in kinds.items())
        raise ValueError(
            f"{told}: a DeepSpeed engine trains weights of one dtype. Prepare the model in fp32, and choose the "
            "dtype that it computes in by mixed_precision"
        )
    if optimizer is not None and stage:
        _check_groups(trained, optimizer, stage)
        check_divisible(optimizer, where="ZeRO", scalars=False)


def _check_layout(model: nn.Module, names: Mapping[Tensor, str], stage: int) -> None:
    """Refuse parameters that DeepSpeed cannot broadcast, flatten or reduce."""
    if apart := [name for p, name in names.items() if not p.is_contiguous()]:
        raise ValueError(
            f"{list_some(apart)}: not contiguous in memory (transposed, or channels_last), which DeepSpeed cannot "
            "send to other ranks, nor lay out flat. Before prepare(), parameter.data = parameter.data.contiguous(); "
            "inputs may stay in channels_last, in which convolutions then compute"
        )
    if odd := [name for p, name in names.items() if p.is_complex() and (p.requires_grad or stage == 3)]:
        raise ValueError(
            f"{list_some(odd)}: complex, which DeepSpeed does not train in (its masters are float32); keep it as "
            "torch.view_as_real(...) in the module, or choose another backend"
        )
    sparse = [m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse]
    if given := [names[m.weight] for m in sparse if m.weight in names and m.weight.requires_grad]:
        raise ValueError(
            f"{list_some(given)}: of an embedding with sparse=True, whose sparse gradients DeepSpeed does not "
            "reduce; build it with sparse=False, or choose backend='ddp'"
        )


def _check_groups(trained: Mapping[Tensor, str], optimizer: Optimizer, stage: int) -> None:
    """Refuse trained parameters in no group; in stages 1 and 2 also a group without trained parameters."""
    kind, groups = type(optimizer).__name__, optimizer.param_groups
    held = {p for group in groups for p in group["params"]}
    if left_out := [name for p, name in trained.items() if p not in held]:
        raise ValueError(
            f"{list_some(left_out)}: to be trained, but not held by {kind}: DeepSpeed's stage {stage} would leave "
            "their gradients out of the norm that is clipped by. Give them to the optimizer, or freeze them before "
            "prepare(), requires_grad_(False)"
        )
    for index, group in enumerate(groups if stage < 3 else ()):
        if not any(p.requires_grad for p in group["params"]):
            raise ValueError(
                f"group {index} of {kind} holds no parameter that is to be trained: DeepSpeed's stage {stage} has no "
                "place for such a group; leave it out of the optimizer"
            )


def check_rounding(model: nn.Module, zero: Mapping[str, Any], policy: Policy, device: torch.device) -> None:
    """Refuse to keep fp32 weights on an NVMe drive if the engine would round them to bf16.

    The engine rounds on a device without fp16, such as the CPU, when it partitions a full model.
    """
    on_drive = zero.get("offload_param", {}).get("device") == "nvme"
    whole = not all(map(is_divided, model.parameters()))
    if on_drive and whole and policy.mode == "no" and device.type == "cpu":
        raise ValueError(
            f"offload_param='nvme' with the fp32 weights of {type(model).__name__} on the CPU: DeepSpeed would round "
            "them to bf16; build the model inside accelerator.building(), or train in mixed precision"
        )


def check_dtypes(policy: Policy) -> None:
    """Refuse dtypes that an engine does not apply."""
    said = policy.dtypes.said()
    if refused := [name for name in said if name not in ("reduce_dtype", "output_dtype")]:
        listed = ", ".join(f"precision.{name}={said[name]!r}" for name in refused)
        raise PrecisionError(
            f"{listed} with backend='deepspeed': an engine holds its weights in the dtype of mixed_precision and its "
            "masters in fp32, all modules alike, and steps by itself. It takes reduce_dtype and output_dtype; fsdp, "
            "ddp and single take them all"
        )
