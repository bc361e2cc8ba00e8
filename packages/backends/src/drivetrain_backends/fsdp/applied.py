"""The values in force of the `fsdp` section, read back from sharded models for the effective plan."""

from collections.abc import Sequence

from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor

from drivetrain_backends.fsdp import compat
from drivetrain_backends.fsdp.models.sharded_model import ShardedModel
from drivetrain_backends.modules.wrap_policy import class_name
from drivetrain_backends.protocol import AutoValue
from drivetrain_backends.settings import FSDPSettings
from drivetrain_parallel import holds_experts
from drivetrain_precision.dtypes.dtype_policy import HALF, NAMES


def read_back(models: Sequence[ShardedModel], settings: FSDPSettings, reason: str) -> dict[str, object]:
    """Return the models' values of the section's fields; an `AutoValue` for a field that the section left open.

    `reason` says why the strategy was chosen; it is empty if the section sets the strategy.
    """
    models = [model for model in models if len(model.plain) < len(model.parameters)]  # those with shards
    if not models:
        return {}
    # The arguments of `fully_shard` are the same for all models, but for experts.
    blocks = [block for block in models[0].blocks if not holds_experts(block)]
    group = next(group for block in blocks for group in compat.parameter_groups(block))
    offloads = isinstance(group.offload_policy, CPUOffloadPolicy)
    resharding, other = (
        ("full_shard", "shard_grad_op") if group.mesh_info.mesh.ndim == 1 else ("hybrid_shard", "no_shard")
    )
    found = {
        "strategy": resharding if compat.reshards_after_forward(group) else other,
        "shard_size": group.mesh_info.shard_mesh_size,
        "offload": offloads,
        "pin_memory": offloads and group.offload_policy.pin_memory,
        **_read_back_models(models, settings),
    }
    reasons = _reasons(models, settings, reason)
    return {
        name: AutoValue(value=value, reason=reasons.get(name, "not said, so chosen for the run"))
        if getattr(settings, name) is None or (name in _MAY_FALL_SHORT and reasons.get(name))
        else value
        for name, value in found.items()
    }


def reduction_dtype(models: Sequence[ShardedModel]) -> str | None:
    """Return the dtype in which gradients of shards are reduced; None for their own dtype or without shards."""
    for model in models:
        if len(model.plain) < len(model.parameters):
            dtype = compat.mixed_precision(model.blocks[0]).reduce_dtype
            return None if dtype is None else NAMES[dtype]
    return None


_MAY_FALL_SHORT = ("wrap", "prefetch")  # of the requested value, with a reason


def _read_back_models(models: Sequence[ShardedModel], settings: FSDPSettings) -> dict[str, object]:
    """Return the fields whose values depend on the modules of the models."""
    blocks = [model.module.get_submodule(name) for model in models for name in model.plan.blocks]
    blocks = [block for block in blocks if not holds_experts(block)]
    classes = {class_name(block) for block in blocks}
    asked = [name for name in settings.wrap or () if name in classes]
    trained = [p for model in models for p in model.known if p.requires_grad and isinstance(p, DTensor)]
    ahead = [compat.num_prefetched(block) for model in models for block in model.blocks]
    return {
        "wrap": (*asked, *sorted(classes.difference(asked))),
        "upcast": not any(p.dtype in HALF for p in trained)
        if settings.upcast
        else any(model.upcast for model in models),
        "prefetch": max(ahead),
    }


def _reasons(models: Sequence[ShardedModel], settings: FSDPSettings, strategy: str) -> dict[str, str]:
    shared = "; ".join(
        f"{name} is left out, as it shares {other}"
        for model in models
        for name, other in model.plan.left_out.items()
    )
    said = "" if settings.wrap is not None else models[0].plan.reason
    prefetch = "torch's own order: one block ahead in backward"
    if settings.prefetch is not None:
        most = max(len(model.blocks) for model in models) - 1
        prefetch = "there are no more blocks" if most < settings.prefetch else ""
    return {"strategy": strategy, "wrap": "; ".join(filter(None, (said, shared))), "prefetch": prefetch}
