"""What is in force, read back from the modules that `fully_shard` made."""

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor

from drivetrain_backends.activation import checkpointing_of
from drivetrain_backends.fsdp.dtypes import HALF, NAMES
from drivetrain_backends.fsdp.sharded_model import ShardedModel
from drivetrain_backends.fsdp.wrap_plan import class_name
from drivetrain_backends.protocol import Chosen
from drivetrain_backends.settings import FSDPSettings


def read_back(models: Sequence[ShardedModel], settings: FSDPSettings, reason: str) -> dict[str, object]:
    """The section's fields as they are in the first model; `Chosen` where the section left them open.

    Args:
        models: The sharded models.
        settings: The `fsdp` section.
        reason: Why the strategy was chosen, where it was.
    """
    if not models:
        return {}
    first = models[0]
    root, block = first.blocks[-1], first.blocks[0]
    group, dtypes = _group(first), _state(block)._mp_policy
    trained = [p for p in first.parameters.values() if p.requires_grad and isinstance(p, DTensor)]
    blocks: list[nn.Module] = [first.module.get_submodule(name) for name in first.plan.blocks]
    offloads = isinstance(group.offload_policy, CPUOffloadPolicy)
    found: dict[str, object] = {
        "strategy": _strategy(group),
        "shard_size": group.mesh_info.shard_mesh_size,
        "wrap": tuple(sorted({class_name(module) for module in blocks})),
        "param_dtype": NAMES.get(dtypes.param_dtype),
        "reduce_dtype": NAMES.get(dtypes.reduce_dtype),
        "output_dtype": NAMES.get(_state(root)._mp_policy.output_dtype),
        "upcast": bool(trained) and not any(p.dtype in HALF for p in trained),
        "offload": offloads,
        "pin_memory": offloads and group.offload_policy.pin_memory,
        "prefetch": len(_state(block)._states_to_forward_prefetch),
        "activation_checkpointing": checkpointing_of(blocks[0]) if blocks else "none",
        "compile_regions": any("forward" in vars(module) for module in blocks),
        "compile_backend": settings.compile_backend,
        "min_num_params": settings.min_num_params,
    }
    reasons = _reasons(first, reason)
    left_open = {name for name in found if getattr(settings, name) is None}
    return {
        name: Chosen(value=value, reason=reasons.get(name, "not said, so chosen for the run"))
        if name in left_open
        else value
        for name, value in found.items()
        if name != "min_num_params" or value is not None
    }


def _reasons(model: ShardedModel, strategy: str) -> dict[str, str]:
    shared = "; ".join(
        f"{name} is left out, as it shares {other}" for name, other in model.plan.left_out.items()
    )
    return {
        "strategy": strategy,
        "wrap": "; ".join(filter(None, (model.plan.reason, shared))),
        "param_dtype": "the run's precision",
        "reduce_dtype": "fp32 where parameters are in half precision, else their own",
        "output_dtype": "as computed",
        "prefetch": "0 is torch's own order: one block ahead in backward",
    }


def _strategy(group: Any) -> str:
    mesh, reshards = group.mesh_info, group._reshard_after_forward
    if mesh.mesh.ndim == 1:
        return "full_shard" if reshards else "shard_grad_op"
    return "hybrid_shard" if reshards else "no_shard"


def _group(model: ShardedModel) -> Any:
    """The parameter group of the first block that has one, as torch keeps it; it tells of it nowhere else."""
    for block in model.blocks:
        state = _state(block)
        groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.11; one group before
        if groups is None:
            groups = [state._fsdp_param_group]
        if groups and groups[0] is not None:
            return groups[0]
    raise AssertionError("no parameter is sharded")


def _state(block: FSDPModule) -> Any:
    return block._get_fsdp_state()  # pyright: ignore[reportPrivateUsage] torch tells it nowhere else
