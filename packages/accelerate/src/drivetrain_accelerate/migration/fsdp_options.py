"""The FSDP options of Accelerate's files and command line, mapped to the `fsdp` section."""

from collections.abc import Mapping
from typing import Any

from drivetrain_accelerate.migration.option_meanings import (
    NO_CHANGE,
    Family,
    Meaning,
    is_set,
    notice,
    one_of,
    pass_through,
    refused,
    set_field,
    spelled,
    switch,
)

_FULL_SHARD = set_field("fsdp", "strategy", "full_shard")
_SHARD_GRAD_OP = set_field("fsdp", "strategy", "shard_grad_op")
_NO_HYBRID = (
    "no strategy here shards within a node and keeps parameters gathered; "
    "--fsdp-strategy hybrid_shard lets them go, shard_grad_op shards over all ranks"
)
_NO_RESHARD = (
    "say SHARD_GRAD_OP, which keeps parameters until backward has passed, or replicate with "
    "--fsdp-strategy no_shard"
)
_NO_POST = (
    "FSDP2 gathers blocks before it computes the gradients of this one, as with BACKWARD_PRE, or not ahead at all; "
    "leave it out, or say how many blocks with --fsdp-prefetch N"
)
_LOADING = (
    "say it in the script: build the model inside accelerator.building(), or with values on rank 0 and on meta "
    "elsewhere, and prepare hands them on"
)
_SIZE_BASED = ("size_based_wrap", "2")

# Old files use another key than new ones; the values mean the same.
_BACKWARD_PREFETCH = one_of(
    {
        "BACKWARD_PRE 1": NO_CHANGE,
        "BACKWARD_POST 2": refused(_NO_POST),
        "NO_PREFETCH 3": set_field("fsdp", "prefetch", 0),
    }
)
_OFFLOAD = switch(on=set_field("fsdp", "offload", True), off=set_field("fsdp", "offload", False))


def _activation_checkpointing(value: Any) -> Meaning:
    """Read Accelerate's true or false; accept drivetrain's `full`, `none` and `selective` too."""
    word = {"true": "full", "false": "none"}.get(spelled(value), value)
    return set_field("fsdp", "activation_checkpointing", word)


def _together(given: Mapping[str, Any]) -> Mapping[str, Meaning]:
    """Read `fsdp_min_num_params`, which only SIZE_BASED_WRAP uses."""
    policy, number = given.get("fsdp_auto_wrap_policy"), given.get("fsdp_min_num_params")
    counts = is_set(number) and spelled(number) != "0"
    if not is_set(policy):
        return {}
    if spelled(policy) in _SIZE_BASED:
        missing = refused("needs a size: say fsdp_min_num_params")
        return {} if counts else {"fsdp_auto_wrap_policy": missing}
    if number is None:
        return {}
    beside = refused(f"goes with SIZE_BASED_WRAP, not with {policy}; leave one of the two out")
    return {"fsdp_min_num_params": beside if counts else NO_CHANGE}


FSDP = Family(
    words={
        "fsdp_version": one_of({"2": NO_CHANGE, "1": notice("FSDP2 is what runs; it trains the same")}),
        "fsdp_sharding_strategy": one_of(
            {
                "FULL_SHARD 1": _FULL_SHARD,
                "SHARD_GRAD_OP 2": _SHARD_GRAD_OP,
                "NO_SHARD 3": set_field("fsdp", "strategy", "no_shard"),
                "HYBRID_SHARD 4": set_field("fsdp", "strategy", "hybrid_shard"),
                "HYBRID_SHARD_ZERO2 5": refused(_NO_HYBRID),
            }
        ),
        "fsdp_reshard_after_forward": one_of(
            {
                "true FULL_SHARD": _FULL_SHARD,
                "false SHARD_GRAD_OP": _SHARD_GRAD_OP,
                "NO_RESHARD": refused(_NO_RESHARD),
            }
        ),
        "fsdp_offload_params": _OFFLOAD,
        "fsdp_cpu_offload": _OFFLOAD,
        "fsdp_auto_wrap_policy": one_of(
            {
                # Without classes, both libraries wrap the model's own _no_split_modules.
                "TRANSFORMER_BASED_WRAP 1": NO_CHANGE,
                "SIZE_BASED_WRAP 2": NO_CHANGE,
                "NO_WRAP 3": set_field("fsdp", "wrap", ()),
            }
        ),
        "fsdp_transformer_layer_cls_to_wrap": pass_through("fsdp", "wrap"),
        "fsdp_min_num_params": pass_through("fsdp", "min_num_params"),
        "fsdp_activation_checkpointing": _activation_checkpointing,
        "fsdp_activation_checkpointing_offload": switch(
            on=refused("activations are not offloaded here; --fsdp-activation-checkpointing full saves most")
        ),
        "fsdp_cpu_ram_efficient_loading": switch(on=notice(_LOADING)),
        # Checkpoints hold whole tensors by name, which load on any number of ranks.
        "fsdp_state_dict_type": one_of(
            {
                "FULL_STATE_DICT 1": NO_CHANGE,
                "SHARDED_STATE_DICT 3": NO_CHANGE,
                "LOCAL_STATE_DICT 2": refused(
                    "checkpoints hold whole tensors by name, never a rank's own layout; leave it out"
                ),
            }
        ),
        "fsdp_backward_prefetch": _BACKWARD_PREFETCH,
        "fsdp_backward_prefetch_policy": _BACKWARD_PREFETCH,
        "fsdp_forward_prefetch": switch(on=set_field("fsdp", "prefetch", 1)),
        # FSDP2 always keeps the model's own parameters, which support all that flat ones do.
        "fsdp_use_orig_params": switch(on=NO_CHANGE),
        "fsdp_sync_module_states": switch(
            on=NO_CHANGE, off=notice("all ranks start from rank 0's values, whatever theirs are")
        ),
    },
    together=_together,
)
