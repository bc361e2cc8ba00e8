"""Translate an FSDP plugin into the `fsdp` section and fields of the `precision` section."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.wrap import (
    ModuleWrapPolicy,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)

from drivetrain_accelerate.environment_variables import truth
from drivetrain_accelerate.plugins.compat import either_policy, wrapped_classes
from drivetrain_accelerate.plugins.fsdp_plugin import (
    STRATEGIES,
    FullyShardedDataParallelPlugin,
    allocate_empty,
    meant_by,
)
from drivetrain_accelerate.plugins.option_fields import TranslationError, refusal

_STRATEGIES = {
    ShardingStrategy.FULL_SHARD: "full_shard",
    ShardingStrategy.SHARD_GRAD_OP: "shard_grad_op",
    ShardingStrategy.NO_SHARD: "no_shard",
    ShardingStrategy.HYBRID_SHARD: "hybrid_shard",
}
_HALF = ("bf16", "fp16")
_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def fsdp_sections(
    plugin: FullyShardedDataParallelPlugin, models: Sequence[nn.Module] = ()
) -> dict[str, object]:
    """Return the fields of the `fsdp` section for a plugin. `set_auto_wrap_policy` may have run or not.

    peft's wrap policy may name classes that a model lacks. If models are given, such classes are left out.
    """
    # Of a refused field, the values that mean nothing else than its default.
    for name, allowed in (
        ("backward_prefetch", (None, BackwardPrefetch.BACKWARD_PRE)),
        ("ignored_modules", (None,)),
        ("param_init_fn", (None, allocate_empty)),
        ("activation_checkpointing_offload", (None, False)),
    ):
        if (value := getattr(plugin, name)) not in allowed:
            raise refusal(plugin, name, value)
    if plugin.state_dict_type == StateDictType.LOCAL_STATE_DICT:
        instead = "saves hold whole tensors by name, never a rank's own layout; say FULL_STATE_DICT"
        raise refusal(plugin, "state_dict_type", "LOCAL_STATE_DICT", instead, ours="checkpoint")
    section: dict[str, object] = {"strategy": _strategy(plugin), **_read_wrapping(plugin, models)}
    held = plugin.cpu_offload
    section["offload"] = (
        held.offload_params if isinstance(held, CPUOffload) else isinstance(held, CPUOffloadPolicy)
    )
    if isinstance(held, CPUOffloadPolicy) and not held.pin_memory:
        section["pin_memory"] = False
    if plugin.forward_prefetch:
        section["prefetch"] = 1
    return section


def fsdp_model_section(
    plugin: FullyShardedDataParallelPlugin, sharded: Mapping[str, object]
) -> dict[str, object]:
    """Return the fields of the `model` section for a plugin whose `fsdp` section is `sharded`: the same blocks."""
    if not truth(plugin.activation_checkpointing or False, of="activation_checkpointing"):
        return {}
    wrap = sharded.get("wrap")
    return {"activation_checkpointing": "full", **({"blocks": wrap} if wrap else {})}


def fsdp_precision_sections(
    plugin: FullyShardedDataParallelPlugin, mixed_precision: str, *, is_strict: bool = True
) -> dict[str, object]:
    """Return the fields of the `precision` section for a plugin's own policy.

    Call this before `plugin.set_mixed_precision(mode)`, since that sets a policy even if the program gave none.
    Without a policy, drivetrain adds gradients up in fp32; with `is_strict=False`, in the run's half precision.
    """
    policy: Any = plugin.mixed_precision_policy
    if policy is None:
        return {} if is_strict or mixed_precision not in _HALF else {"reduce_dtype": mixed_precision}
    compute = {"no": None, "fp8": torch.bfloat16, "bf16": torch.bfloat16, "fp16": torch.float16}[
        mixed_precision
    ]
    if policy.param_dtype not in (compute, torch.float32 if compute is None else compute):
        instead = (
            f"it computes in {policy.param_dtype}, but the run has {mixed_precision=}; set both to one dtype"
        )
        raise refusal(plugin, "mixed_precision_policy", policy, instead, ours="run.mixed_precision")
    default = type(policy)()
    for name in ("cast_forward_inputs", "keep_low_precision_grads", "cast_root_forward_inputs"):
        if (given := getattr(policy, name, None)) != getattr(default, name, None):
            raise TranslationError(
                f"mixed_precision_policy: {name}={given} (drivetrain: backend fsdp): inputs are cast to the dtype "
                "that a block computes in, and gradients are held in the parameters' own; leave it out"
            )
    return {
        name: _NAMES[dtype]
        for name in ("reduce_dtype", "buffer_dtype", "output_dtype")
        if (dtype := getattr(policy, name, None)) is not None
    }


def _strategy(plugin: FullyShardedDataParallelPlugin) -> str:
    """Return the strategy: that of `reshard_after_forward` if set, or else of the older `sharding_strategy`."""
    said, older = plugin.reshard_after_forward, plugin.sharding_strategy
    if isinstance(said, bool):
        said = ShardingStrategy.FULL_SHARD if said else ShardingStrategy.SHARD_GRAD_OP
    before: Any = None if older is None else meant_by(older, STRATEGIES, "sharding_strategy")
    strategy: Any = before if said is None else said
    # FULL_SHARD is what stands there if it is not said.
    if before not in (None, strategy, ShardingStrategy.FULL_SHARD):
        instead = f"contradicts reshard_after_forward={plugin.reshard_after_forward}; keep one of the two"
        raise refusal(plugin, "sharding_strategy", older, instead)
    if strategy not in _STRATEGIES:
        instead = (
            "nothing here shards within a node and keeps parameters gathered; HYBRID_SHARD lets them go, "
            "SHARD_GRAD_OP shards over all ranks"
        )
        raise refusal(plugin, "sharding_strategy", strategy.name.lstrip("_"), instead)
    return _STRATEGIES[strategy]


def _read_wrapping(plugin: FullyShardedDataParallelPlugin, models: Sequence[nn.Module]) -> dict[str, object]:
    names, least = plugin.transformer_cls_names_to_wrap, plugin.min_num_params
    policy = plugin.auto_wrap_policy
    if policy is None:  # what is said beside it is not heard in Accelerate, and is here
        said: dict[str, object] = {"wrap": tuple(names) if names else None, "min_num_params": least or None}
        found = {name: value for name, value in said.items() if value} or {"wrap": ()}
    else:
        found = _read_policy(policy, plugin, models)
    if len(found) > 1 or (least and "min_num_params" not in found):
        instead = f"goes with size_based_wrap, not with {names or policy!r}; leave one of the two out"
        raise refusal(plugin, "min_num_params", least, instead)
    return found


def _read_policy(
    policy: Any, plugin: FullyShardedDataParallelPlugin, models: Sequence[nn.Module]
) -> dict[str, object]:
    """Return the classes or the size of a wrap policy: torch's function, its partial, or peft's combination."""
    function = _function(policy)
    options: dict[str, Any] = policy.keywords if isinstance(policy, partial) else {}
    if function is transformer_auto_wrap_policy:
        names = plugin.transformer_cls_names_to_wrap
        if (classes := options.get("transformer_layer_cls")) is not None:
            names = _names(classes, models)
        return {"wrap": tuple(names)} if names else {}  # the model's own blocks
    if function is size_based_auto_wrap_policy:
        least = options.get("min_num_params", plugin.min_num_params)
        return {"min_num_params": least} if least else {"wrap": ()}
    if isinstance(policy, ModuleWrapPolicy):
        return {"wrap": tuple(_names(wrapped_classes(policy), models))}
    if function is either_policy:
        # peft wraps each trainable leaf too, since FSDP1 shards what is trained and what is not apart: FSDP2 shards
        # each parameter by itself.
        known = [part for part in options["policies"] if _function(part) is not lambda_auto_wrap_policy]
        if len(known) == 1:
            return _read_policy(known[0], plugin, models)
    instead = (
        "blocks are chosen by class or by size: say auto_wrap_policy='transformer_based_wrap' with "
        "transformer_cls_names_to_wrap, or 'size_based_wrap' with min_num_params"
    )
    raise refusal(plugin, "auto_wrap_policy", policy, instead)


def _names(classes: Iterable[type[nn.Module]], models: Sequence[nn.Module]) -> list[str]:
    """Return the sorted names of classes. If models are given, skip classes that no model contains."""
    there = {type(module) for model in models for module in model.modules()}
    return sorted(kind.__name__ for kind in classes if not models or kind in there)


def _function(policy: Any) -> Any:
    return policy.func if isinstance(policy, partial) else policy
