"""The weights of sharded models: functions to load them, and helpers that programs call."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from drivetrain_accelerate.compat import tied_weights_keys
from drivetrain_backends import load_full_state_dict
from drivetrain_config import environ

if TYPE_CHECKING:
    from drivetrain_accelerate.accelerator.accelerator import Accelerator


def enable_fsdp_ram_efficient_loading() -> None:
    """Set environment variables by which transformers reads a checkpoint on rank 0 only."""
    environ.put(ACCELERATE_USE_FSDP="True", FSDP_CPU_RAM_EFFICIENT_LOADING="True")


def disable_fsdp_ram_efficient_loading() -> None:
    """Set environment variables by which transformers reads a checkpoint on every rank."""
    environ.put(FSDP_CPU_RAM_EFFICIENT_LOADING="False")


def ensure_weights_retied(
    param_init_fn: Callable[[nn.Module], nn.Module], model: nn.Module, device: torch.device
) -> Callable[[nn.Module], nn.Module]:
    """Return a `param_init_fn` that keeps tied weights a single tensor, on the device of the first weight."""
    if not tied_weights_keys(model):
        return param_init_fn
    holders: dict[nn.Module, dict[str, Tensor]] = {}
    counts = Counter(id(each) for _, each in model.named_parameters(remove_duplicate=False))
    for module in model.modules():
        own: dict[str, Tensor] = {
            name: each for name, each in module.named_parameters(recurse=False) if counts[id(each)] > 1
        }
        if own:
            holders[module] = own
    first: dict[int, Tensor] = {}

    def initialised(module: nn.Module) -> nn.Module:
        result = param_init_fn(module)
        for name, before in holders.get(module, {}).items():
            kept = first.setdefault(id(before), getattr(result, name))
            setattr(result, name, kept)
        return result

    return initialised


def fsdp2_load_full_state_dict(
    accelerator: "Accelerator", model: nn.Module, full_sd: Mapping[str, Any], cpu_offload: bool = False
) -> None:
    """Load a prepared model from full weights that only the main process reads. Called on all ranks."""
    prepared = accelerator.inner.prepared_of(model)
    load_full_state_dict(
        prepared, full_sd if accelerator.is_main_process else None, accelerator.inner.context
    )


def fsdp2_canonicalize_names(named_params: dict[str, Any]) -> dict[str, Any]:
    """Return the values by name, without the prefixes that wrappers of modules add."""
    return {
        re.sub(r"_checkpoint_wrapped_module\.|_orig_mod\.", "", name): value
        for name, value in named_params.items()
    }


def get_fsdp2_grad_scaler(**kwargs: Any) -> GradScaler:
    """Return a GradScaler for fp16. Prepared models do not need it: drivetrain scales their losses."""
    return GradScaler(**kwargs)


def get_parameters_from_modules(
    modules: Iterable[nn.Module] | str, model: nn.Module, device: torch.device | str
) -> set[nn.Parameter]:
    """Move the parameters of modules to a device, and return them. A text is a pattern for full names of modules."""
    if isinstance(modules, str):
        pattern = re.compile(modules)
        chosen = [module for name, module in model.named_modules() if pattern.fullmatch(name)]
    else:
        chosen = list(modules or ())
    return {parameter for module in chosen for parameter in module.to(device).parameters()}
