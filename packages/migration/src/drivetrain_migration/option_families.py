"""Accelerate's options of FSDP, DeepSpeed, fp8 and the launch, in files and on the command line: a table for each."""

import re
from collections.abc import Mapping
from typing import Any

from drivetrain_migration.option_meanings import (
    NO_CHANGE,
    UNSAID,
    Family,
    Meaning,
    Reader,
    choice,
    is_set,
    notice,
    one_of,
    only,
    pass_through,
    refused,
    set_field,
    spelled,
    switch,
    unless_off,
)

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
# Old files use another key than new ones; the values mean the same.
_BACKWARD_PREFETCH = choice(
    "fsdp",
    "prefetch",
    {"BACKWARD_PRE 1": NO_CHANGE, "BACKWARD_POST 2": refused(_NO_POST), "NO_PREFETCH 3": 0},
)
_OFFLOAD = choice("fsdp", "offload", {"true": True, "false": False})


def _activation_checkpointing(value: Any) -> Meaning:
    """Read Accelerate's true or false; accept drivetrain's `full`, `none` and `selective` too."""
    word = {"true": "full", "false": "none"}.get(spelled(value), value)
    return set_field("model", "activation_checkpointing", word)


def _fsdp_together(given: Mapping[str, Any]) -> Mapping[str, Meaning]:
    """Read `fsdp_min_num_params`, an option that only SIZE_BASED_WRAP uses."""
    policy, number = given.get("fsdp_auto_wrap_policy"), given.get("fsdp_min_num_params")
    counts = is_set(number) and spelled(number) != "0"
    if not is_set(policy):
        return {}
    if spelled(policy) in ("size_based_wrap", "2"):
        missing = refused("needs a size: say fsdp_min_num_params")
        return {} if counts else {"fsdp_auto_wrap_policy": missing}
    if number is None:
        return {}
    beside = refused(f"goes with SIZE_BASED_WRAP, not with {policy}; leave one of the two out")
    return {"fsdp_min_num_params": beside if counts else NO_CHANGE}


FSDP = Family(
    words={
        "fsdp_version": one_of({"2": NO_CHANGE, "1": notice("FSDP2 is what runs; it trains the same")}),
        "fsdp_sharding_strategy": choice(
            "fsdp",
            "strategy",
            {
                "FULL_SHARD 1": "full_shard",
                "SHARD_GRAD_OP 2": "shard_grad_op",
                "NO_SHARD 3": "no_shard",
                "HYBRID_SHARD 4": "hybrid_shard",
                "HYBRID_SHARD_ZERO2 5": refused(_NO_HYBRID),
            },
        ),
        "fsdp_reshard_after_forward": choice(
            "fsdp",
            "strategy",
            {
                "true FULL_SHARD": "full_shard",
                "false SHARD_GRAD_OP": "shard_grad_op",
                "NO_RESHARD": refused(_NO_RESHARD),
            },
        ),
        "fsdp_offload_params": _OFFLOAD,
        "fsdp_cpu_offload": _OFFLOAD,
        "fsdp_auto_wrap_policy": choice(
            "fsdp",
            "wrap",
            # Without classes, both libraries wrap the model's own _no_split_modules.
            {"TRANSFORMER_BASED_WRAP 1 SIZE_BASED_WRAP 2": NO_CHANGE, "NO_WRAP 3": ()},
        ),
        "fsdp_transformer_layer_cls_to_wrap": pass_through("fsdp", "wrap"),
        "fsdp_min_num_params": pass_through("fsdp", "min_num_params"),
        "fsdp_activation_checkpointing": _activation_checkpointing,
        "fsdp_activation_checkpointing_offload": switch(
            on=refused("activations are not offloaded here; --model-activation-checkpointing full saves most")
        ),
        "fsdp_cpu_ram_efficient_loading": switch(on=notice(_LOADING)),
        # Checkpoints hold whole tensors by name, which load on any number of ranks.
        "fsdp_state_dict_type": one_of(
            {
                "FULL_STATE_DICT 1 SHARDED_STATE_DICT 3": NO_CHANGE,
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
    together=_fsdp_together,
)

_NODES = (
    "nodes are started one by one: run drivetrain launch on each, with --num-nodes N --node-rank I "
    "--master-addr HOST"
)
_HOSTS = f"{_NODES}; --devices 0,1 takes some of its devices"
_BUILDING = "say it in the script: inside accelerator.building() parameters are partitioned as they are made"
_DEVICES = {"none": "none", "cpu": "cpu", "nvme": "nvme"}
_SAVING = "save_state writes whole weights in every stage, in fp32"


def _gradient_clipping(value: Any) -> Meaning:
    if not is_set(value):
        return NO_CHANGE
    try:
        return set_field("deepspeed", "config", {"gradient_clipping": float(value)})
    except (TypeError, ValueError):
        return refused("must be a number, the norm that gradients are clipped to")


def _deepspeed_together(given: Mapping[str, Any]) -> Mapping[str, Meaning]:
    """Refuse a clipping norm if a configuration file is given; ignore options of stage 3 in other stages."""
    found: dict[str, Meaning] = {}
    file, stage = given.get("deepspeed_config_file"), given.get("zero_stage")
    if is_set(file) and is_set(given.get("gradient_clipping")):
        found["gradient_clipping"] = refused(f"write gradient_clipping into {file}, and leave it out here")
    if is_set(stage) and spelled(stage) != "3":
        found |= {word: NO_CHANGE for word in ("zero3_init_flag", "zero3_save_16bit_model") if word in given}
    return found


DEEPSPEED = Family(
    words={
        "deepspeed_config_file": pass_through("deepspeed", "config"),
        "zero_stage": choice("deepspeed", "stage", {str(stage): stage for stage in range(4)}),
        "offload_optimizer_device": choice("deepspeed", "offload_optimizer", _DEVICES),
        "offload_param_device": choice("deepspeed", "offload_param", _DEVICES),
        "offload_optimizer_nvme_path": pass_through("deepspeed", "nvme_path"),
        "offload_param_nvme_path": pass_through("deepspeed", "nvme_path"),
        "gradient_accumulation_steps": pass_through("run", "gradient_accumulation_steps"),
        "gradient_clipping": _gradient_clipping,
        "zero3_init_flag": switch(on=notice(_BUILDING)),
        "zero3_save_16bit_model": switch(on=notice(_SAVING)),
        "deepspeed_hostfile": unless_off(_NODES),
        "deepspeed_exclusion_filter": unless_off(_HOSTS),
        "deepspeed_inclusion_filter": unless_off(_HOSTS),
        "deepspeed_multinode_launcher": one_of({"standard none null": NO_CHANGE}, otherwise=refused(_NODES)),
        "deepspeed_moe_layer_cls_names": unless_off(
            "no setting here says which layers hold experts; leave it out, and in stage 3 let all ranks use the "
            "same experts in a step"
        ),
    },
    together=_deepspeed_together,
)

_OF_MODEL = (
    "it belongs to the model: say it in the script, as megatron_from_transformers(model, options={...})"
)
_CLIPPING = "say it in the script: accelerator.clip_grad_norm_(model.parameters(), NORM) before the step"
_WHOLE_STATES = (
    "optimizer states are not divided among replicas, which trains the same with more memory; fsdp does"
)
_WEIGHTS_ALONE = (
    "save_model and load_model hold the weights alone; save_state and load_state hold all of a run"
)
_OTHER_AXES = (
    "Megatron's models are divided by tensor and pipeline here; --backend fsdp has --parallel-context N and "
)


def _megatron_together(given: Mapping[str, Any]) -> Mapping[str, Meaning]:
    """Read the number of micro-batches of a step: a pipeline cuts a batch into them, else they accumulate."""
    word, number = "megatron_lm_num_micro_batches", given.get("megatron_lm_num_micro_batches")
    if not is_set(number) or spelled(given.get("megatron_lm_pp_degree", "1")) in ("1", *UNSAID):
        return {}
    return {
        word: Meaning(
            setting=("parallel", "pipeline_micro_batches"),
            value=number,
            notice="a batch is cut into them: give the loader as many times the samples of one",
        )
    }


MEGATRON = Family(
    words={
        "megatron_lm_tp_degree": pass_through("parallel", "tensor"),
        "megatron_lm_pp_degree": pass_through("parallel", "pipeline"),
        "megatron_lm_num_micro_batches": pass_through("run", "gradient_accumulation_steps"),
        "megatron_lm_gradient_clipping": lambda value: notice(_CLIPPING) if is_set(value) else NO_CHANGE,
        "megatron_lm_use_distributed_optimizer": switch(on=notice(_WHOLE_STATES)),
        "megatron_lm_sequence_parallelism": switch(on=notice(_OF_MODEL)),
        "megatron_lm_recompute_activations": switch(on=notice(_OF_MODEL)),
        **{
            f"megatron_lm_{name}": lambda value: notice(_OF_MODEL) if is_set(value) else NO_CHANGE
            for name in (
                "recompute_granularity", "recompute_method", "recompute_num_layers", "attention_dropout",
                "hidden_dropout", "attention_softmax_in_fp32",
            )
        },
        "megatron_lm_context_parallel_size": only("1", f"{_OTHER_AXES}--parallel-expert N"),
        "megatron_lm_expert_model_parallel_size": only("1", f"{_OTHER_AXES}--parallel-expert N"),
        "megatron_lm_expert_tensor_parallel_size": only("1", f"{_OTHER_AXES}--parallel-expert N"),
        "megatron_lm_decoder_last_pipeline_num_layers": unless_off("stages have equally many layers; leave it out"),
        "megatron_lm_attention_backend": unless_off("converted models have Megatron's local attention; leave it out"),
        "megatron_lm_use_rotary_position_embeddings": switch(on=NO_CHANGE),  # as the model's config says
        "megatron_lm_calculate_per_token_loss": switch(
            on=refused("a loss with count= is normalised by its tokens, over all ranks; leave it out")
        ),
        "megatron_lm_eod_mask_loss": switch(on=refused("mask labels in the script; leave it out")),
        "megatron_lm_no_load_optim": switch(on=refused(_WEIGHTS_ALONE)),
        "megatron_lm_no_save_optim": switch(on=refused(_WEIGHTS_ALONE)),
        **{
            f"megatron_lm_{name}": switch(on=refused("Megatron's optimizers are not used; see --backend fsdp"))
            for name in (
                "optimizer_cpu_offload", "overlap_cpu_optimizer_d2h_h2d", "use_precision_aware_optimizer",
                "use_custom_fsdp",
            )
        },
    },
    together=_megatron_together,
)  # fmt: skip

_MSAMP = "MS-AMP is not here; say AO or TE, or --precision-fp8-recipe with the name of a recipe"
_GATHER = (
    "weights are gathered in bf16; in fp8 with Accelerator(fp8_recipe=TorchaoRecipe(all_gather=True)) in code"
)
_PADDING = "rows are padded; layers with a size that 16 does not divide stay in bf16 here"
_TRUE = ("true", "yes", "y", "t", "1", "on")


def _in_code(option: str, value: Any) -> str:
    """Return the code that sets an option of delayed scaling, since no setting does."""
    text = spelled(value)
    shown = f"{{{option!r}: {text if text.isdigit() else repr(text)}}}"
    return f"Accelerator(fp8_recipe=TransformerEngineRecipe(scaling='delayed', options={shown})) in code"


def _option(name: str, usual: str) -> Reader:
    """Return the reader of an option of delayed scaling: accept the usual value, refuse all others."""
    return lambda value: (
        NO_CHANGE
        if not is_set(value) or spelled(value) == usual
        else refused(f"no setting has it; say {_in_code(name, value)}")
    )


def _override(value: Any) -> Meaning:
    """Read which products (output, input gradient, weight gradient) are computed in higher precision."""
    products = [word in _TRUE for word in re.findall(r"\w+", spelled(value))]
    if not any(products):
        return NO_CHANGE
    if products == [False, False, True]:
        return refused(
            "--precision-fp8-recipe torchao_rowwise_with_gw_hp keeps the weight's gradient in 16 bits"
        )
    return refused(
        "no recipe keeps these products in 16 bits; --precision-fp8-exclude keeps whole layers in bf16, and "
        "--precision-fp8-recipe torchao_rowwise_with_gw_hp the weight's gradient"
    )


_FP8_READERS: Mapping[str, Reader] = {
    "backend": one_of(
        {
            "AO": set_field("precision", "fp8_recipe", "torchao_tensorwise"),
            "TE": Meaning(
                setting=("precision", "fp8_recipe"),
                value="te_delayed",
                notice="scales come from the largest value of the history (max), not from the most recent as "
                f"Accelerate's by default; for these say {_in_code('amax_compute_algo', 'most_recent')}",
            ),
            "MSAMP": refused(_MSAMP),
        }
    ),
    "margin": _option("margin", "0"),
    "interval": only(
        "1",
        "scales are computed in every step, as Transformer Engine does by now; leave it out, and "
        "--precision-fp8-recipe names the recipe",
    ),
    "format": _option("fp8_format", "hybrid"),
    "amax_history_len": _option("amax_history_len", "1024"),
    "amax_compute_algo": _option("amax_compute_algo", "max"),
    "override_linear_precision": _override,
    "opt_level": unless_off(_MSAMP),
    "enable_fsdp_float8_all_gather": switch(on=notice(_GATHER)),
    "pad_inner_dim": switch(on=notice(_PADDING)),
}
# What a switch says on the command line, where it takes no value, and what files name otherwise than flags do.
_IN_FILES: Mapping[str, Reader] = {
    "use_autocast_during_eval": switch(
        on=NO_CHANGE,
        off=notice("evaluation computes in fp8 too; accelerator.autocast(enabled=False) does not"),
    ),
    "use_mxfp8_block_scaling": switch(
        on=refused("say --precision-fp8-recipe te_mxfp8, and leave the backend out")
    ),
    "amax_history_length": _FP8_READERS["amax_history_len"],
    "amax_compute_algorithm": _FP8_READERS["amax_compute_algo"],
    "optimization_level": _FP8_READERS["opt_level"],
}
FP8 = Family(words={f"fp8_{word}": reader for word, reader in _FP8_READERS.items()})
# Accelerate reads the keys of `fp8_config` with and without the prefix of the flags.
FP8_CONFIG = Family(
    words={
        f"{prefix}{word}": reader
        for word, reader in {**_FP8_READERS, **_IN_FILES}.items()
        for prefix in ("", "fp8_")
    }
)

_CONTEXT = "--parallel-context N divides sequences among N processes"
_REPLICATE = (
    "--backend ddp replicates over all ranks; --backend fsdp --fsdp-strategy hybrid_shard replicates over groups of "
    "--fsdp-shard-size N ranks"
)
_SHARD = (
    "--backend fsdp shards over all ranks; --fsdp-strategy hybrid_shard --fsdp-shard-size N over groups of N"
)
_LOGS = "--log-dir FOLDER writes the output of each rank to a file, in addition to the terminal"
_COMPILE = (
    "--model-compile whole compiles the model, --model-compile blocks each block; or call torch.compile(model) in "
    "the script, before accelerator.prepare"
)


def _rendezvous(value: Any) -> Meaning:
    """Read torch's options of a rendezvous: accept the timeout, refuse all others."""
    if not is_set(value):
        return NO_CHANGE
    parts = [part.strip().partition("=") for part in str(value).split(",") if part.strip()]
    pairs = {name: text for name, _, text in parts}
    seconds = [pairs.pop(name) for name in ("timeout", "join_timeout") if name in pairs]
    if pairs:
        return refused(f"{', '.join(pairs)}: only timeout=SECONDS can be set, as --rdzv-timeout-seconds")
    if len(set(seconds)) > 1:
        return refused("timeout and join_timeout are one setting here, --rdzv-timeout-seconds; keep one")
    return set_field("launch", "rdzv_timeout_seconds", seconds[0])


LAUNCH = Family(
    words={
        "tee": one_of(
            {
                "0": NO_CHANGE,
                "3": notice("every rank's output is shown; --log-dir FOLDER writes it to files too"),
            },
            otherwise=refused(_LOGS),
        ),
        "redirects": only("0", _LOGS),
        "role": only("default", "all ranks have one role here; leave it out"),
        "rdzv_conf": _rendezvous,
        "start_method": only("spawn", "ranks are processes of their own here; leave it out"),
        "dynamo_backend": only("no", _COMPILE),
        "main_training_function": only("main", "it is for notebooks; use notebook_launcher(function)"),
        "parallelism_config_dp_replicate_size": only("1", _REPLICATE),
        "parallelism_config_dp_shard_size": only("1", _SHARD),
        "parallelism_config_tp_size": only("1", "--parallel-tensor N divides layers among N processes"),
        "parallelism_config_cp_size": only("1", _CONTEXT),
        "parallelism_config_sp_size": only("1", _CONTEXT),
    },
)
