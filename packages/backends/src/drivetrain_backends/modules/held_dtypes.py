"""Cast models to the dtypes of the run's policy, and choose the modules that stay in fp32."""

from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from drivetrain_backends.modules.compile import unwrap_compiled
from drivetrain_precision import Bf16Updates, DtypePolicy, Policy, PrecisionError, find_islands, keep_in_fp32
from drivetrain_precision.dtypes.dtype_policy import HALF
from drivetrain_precision.dtypes.fp32_islands import restore_island
from drivetrain_precision.dtypes.holding import hold

Islands = dict[nn.Module, frozenset[nn.Module]]


def plan_islands(models: Iterable[nn.Module], policy: Policy, *, known: Iterable[nn.Module] = ()) -> Islands:
    """Return the modules that stay in fp32, by model, without any change. `known` are models prepared earlier."""
    models = list(models)
    inner = [unwrap_compiled(model) for model in models]
    found = find_islands(inner, policy.dtypes.keep_fp32, known=map(unwrap_compiled, known))
    return {model: found[own] for model, own in zip(models, inner, strict=True)}


def make_islands(
    model: nn.Module, islands: frozenset[nn.Module], device: torch.device, *, outside: torch.dtype | None
) -> None:
    """Make only the given modules of a model compute in fp32.

    The other modules compute in `outside`; None if autocast sets their dtype.
    """
    for module in unwrap_compiled(model).modules():
        restore_island(module)
    keep_in_fp32(islands, device, outside=outside)


def hold_model(model: nn.Module, policy: Policy, device: torch.device, islands: frozenset[nn.Module]) -> None:
    """Cast a model's parameters and buffers to the dtypes of the policy; make the islands compute in fp32."""
    outside = policy.dtypes.param if policy.autocast_dtype is None else None
    make_islands(model, islands, device, outside=outside)
    hold(unwrap_compiled(model), policy.dtypes, islands)


def updates_of(dtypes: DtypePolicy) -> Bf16Updates | None:
    """Return the object that steps optimizers and rounds bf16 updates; None if optimizers step by themselves."""
    return Bf16Updates(dtypes.update) if dtypes.update in ("stochastic", "kahan") else None


def check_updates(optimizers: Sequence[Optimizer], dtypes: DtypePolicy) -> None:
    """Refuse a `weight_update` setting without an effect, and two roundings of the same updates."""
    for optimizer in optimizers:
        # torchao's, which sees weights in fp32 where another rounding steps it, and then rounds nothing.
        if updates_of(dtypes) is not None and getattr(optimizer, "bf16_stochastic_round", False):
            said = "" if dtypes.is_update_said else ", the default with param_dtype='bf16'"
            raise PrecisionError(
                f"{type(optimizer).__name__}(bf16_stochastic_round=True) with "
                f"precision.weight_update={dtypes.update!r}{said}: both round the updates of weights "
                "in bf16, and the optimizer's would have no effect; leave bf16_stochastic_round out, or say "
                "weight_update='nearest', which lets the optimizer round"
            )
    if not dtypes.is_update_said or dtypes.param is torch.bfloat16 or not optimizers:
        return
    held = {p.dtype for o in optimizers for group in o.param_groups for p in group["params"]}
    if torch.bfloat16 not in held:
        raise PrecisionError(
            f"precision.weight_update={dtypes.update!r}: it says how updates of weights in bf16 are rounded, and no "
            "optimizer here has one; say param_dtype='bf16', or leave it out"
        )


def reduced_in(dtypes: DtypePolicy) -> torch.dtype | None:
    """Return the dtype in which replicas' gradients are summed; None for the gradients' own dtype."""
    if dtypes.reduce is None and dtypes.param in HALF:
        return torch.float32
    return dtypes.reduce
