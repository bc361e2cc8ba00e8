"""The flags of `accelerate launch`, as a table."""

from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from drivetrain_accelerate.commands.command_line import CustomArgumentParser, spellings
from drivetrain_accelerate.environment_variables import str_to_bool
from drivetrain_accelerate.plugins.constants import TORCH_DYNAMO_MODES
from drivetrain_accelerate.plugins.enums import DynamoBackend

# The words of Accelerate's flag and questions, of which one is spelled otherwise than in the enum.
_WORDS = {DynamoBackend.TORCHXLA_TRACE_ONCE: "TORHCHXLA_TRACE_ONCE"}
_WITHOUT_WORD = (DynamoBackend.NO, DynamoBackend.HPU_BACKEND, DynamoBackend.NEURON)
DYNAMO_BACKENDS = [_WORDS.get(each, str(each.value)) for each in DynamoBackend if each not in _WITHOUT_WORD]

_SEE = "What it means here: the page on Accelerate's flags, one by one."


@dataclass(frozen=True, slots=True)
class _Kind:
    """A kind of flags: the function that converts the text, the default, and the allowed values."""

    names: str
    convert: Callable[[str], Any] | None = None
    default: Any = None
    choices: tuple[str, ...] | None = None


# Switches, by what they are if nobody says them.
_SWITCHES: Mapping[Any, str] = {
    None: "quiet module no_python debug",
    False: """
        cpu multi_gpu tpu enable_cpu_affinity dynamo_use_fullgraph dynamo_use_dynamic dynamo_use_regional_compilation
        use_deepspeed use_fsdp use_parallelism_config use_megatron_lm same_network tpu_cluster tpu_use_sudo
        downcast_bf16 fp8_use_autocast_during_eval
    """,
}
_SHORT = {"quiet": "-q", "module": "-m", "tee": "-t"}
_SEVERAL = ("vm", "env")
_VALUES = (
    _Kind("config_file gpu_ids"),
    _Kind(
        """
        main_process_ip log_dir main_training_function deepspeed_config_file offload_optimizer_device
        offload_param_device offload_optimizer_nvme_path offload_param_nvme_path zero3_init_flag
        zero3_save_16bit_model deepspeed_hostfile deepspeed_exclusion_filter deepspeed_inclusion_filter
        deepspeed_multinode_launcher deepspeed_moe_layer_cls_names fsdp_auto_wrap_policy
        fsdp_transformer_layer_cls_to_wrap fsdp_backward_prefetch fsdp_state_dict_type
        megatron_lm_sequence_parallelism megatron_lm_recompute_activations megatron_lm_use_distributed_optimizer
        megatron_lm_recompute_granularity megatron_lm_recompute_method megatron_lm_attention_backend
        megatron_lm_attention_softmax_in_fp32 megatron_lm_calculate_per_token_loss
        megatron_lm_use_rotary_position_embeddings aws_access_key_id aws_secret_access_key mpirun_hostfile
        parallelism_config_sp_seq_length
        """,
        str,
    ),
    _Kind(
        """
        num_processes num_machines num_cpu_threads_per_process machine_rank main_process_port zero_stage
        gradient_accumulation_steps megatron_lm_decoder_last_pipeline_num_layers megatron_lm_num_micro_batches
        megatron_lm_recompute_num_layers megatron_lm_expert_model_parallel_size megatron_lm_context_parallel_size
        megatron_lm_expert_tensor_parallel_size
        """,
        int,
    ),
    _Kind("gradient_clipping megatron_lm_attention_dropout megatron_lm_hidden_dropout", float),
    _Kind("max_restarts fp8_margin", int, 0),
    _Kind(
        """
        megatron_lm_tp_degree megatron_lm_pp_degree fp8_interval parallelism_config_dp_replicate_size
        parallelism_config_dp_shard_size parallelism_config_tp_size parallelism_config_cp_size
        parallelism_config_sp_size
        """,
        int,
        1,
    ),
    _Kind("fp8_amax_history_len", int, 1024),
    _Kind("fsdp_min_num_params", int, 100_000_000),
    _Kind("monitor_interval", float, 0.1),
    _Kind("megatron_lm_gradient_clipping", float, 1.0),
    _Kind("tee", str, "0"),
    _Kind("role", str, "default"),
    _Kind("rdzv_backend", str, "static"),
    _Kind("rdzv_conf", str, ""),
    _Kind("mixed_precision", str, None, ("no", "fp16", "bf16", "fp8")),
    _Kind("dynamo_backend", str, None, ("no", *(name.lower() for name in DYNAMO_BACKENDS))),
    _Kind("dynamo_mode", str, "default", tuple(TORCH_DYNAMO_MODES)),
    _Kind("fsdp_version", str, "1", ("1", "2")),
    _Kind("fsdp_sharding_strategy", str, "FULL_SHARD"),
    _Kind(
        "fsdp_offload_params fsdp_forward_prefetch fsdp_activation_checkpointing "
        "fsdp_activation_checkpointing_offload",
        str,
        "false",
    ),
    _Kind(
        "fsdp_reshard_after_forward fsdp_use_orig_params fsdp_cpu_ram_efficient_loading fsdp_sync_module_states",
        str,
        "true",
    ),
    _Kind(
        """
        megatron_lm_use_custom_fsdp megatron_lm_no_load_optim megatron_lm_eod_mask_loss
        megatron_lm_overlap_cpu_optimizer_d2h_h2d megatron_lm_no_save_optim megatron_lm_optimizer_cpu_offload
        megatron_lm_use_precision_aware_optimizer
        """,
        str_to_bool,
        False,
    ),
    _Kind("fp8_backend", str, None, ("ao", "te", "msamp")),
    _Kind("fp8_format", str, "HYBRID", ("HYBRID", "E4M3", "E5M2")),
    _Kind("fp8_amax_compute_algo", str, "most_recent", ("max", "most_recent")),
    _Kind(
        "fp8_override_linear_precision",
        lambda text: tuple(bool(str_to_bool(word)) for word in text.split(",")),
        (False, False, False),
    ),
    _Kind("fp8_opt_level", str, "O2", ("O1", "O2")),
    _Kind("fp8_enable_fsdp_float8_all_gather fp8_pad_inner_dim", str_to_bool, 1),
    _Kind("parallelism_config_cp_backend", str, "torch", ("torch",)),
    _Kind("parallelism_config_cp_comm_strategy", str, "allgather"),
    _Kind("parallelism_config_sp_backend", str, "deepspeed", ("deepspeed",)),
    _Kind("parallelism_config_sp_seq_length_is_variable", str_to_bool, True),
    _Kind("parallelism_config_sp_attn_implementation", str, "sdpa"),
)
# A flag whose value has another name in the namespace.
_NAMES = {"tpu_cluster": "tpu_use_cluster"}


def _all_flags() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield each flag, its name in the namespace, and the keyword arguments for argparse."""
    for default, names in _SWITCHES.items():
        for name in names.split():
            yield name, _NAMES.get(name, name), {"action": "store_true", "default": default}
    for kind in _VALUES:
        told = {"type": kind.convert, "default": kind.default, "choices": kind.choices}
        for name in kind.names.split():
            yield name, name, told
    for name in _SEVERAL:
        yield name, name, {"action": "append", "type": str}


def add_flags(parser: CustomArgumentParser) -> None:
    """Add the flags of `accelerate launch` to a parser."""
    for name, dest, told in _all_flags():
        short = [_SHORT[name]] if name in _SHORT else []
        # Both spellings, since the parser of another program's subcommand may be any.
        parser.add_argument(*short, *spellings([f"--{name}"]), dest=dest, help=_SEE, **told)
    off = {"dest": "tpu_use_cluster", "action": "store_false", "default": False}
    parser.add_argument(*spellings(["--no_tpu_cluster"]), help=_SEE, **off)


def words_of(args: Namespace) -> list[str]:
    """Return the command line that gives a parsed namespace."""
    said = getattr(args, "nondefault", None) or ()
    words: list[str] = []
    for name, dest, told in _all_flags():
        default = told.get("default")
        value: Any = getattr(args, dest, default)
        is_said = value != default or dest in said
        if not is_said or value is None or value is False:
            continue
        if value is True:
            words.append(f"--{name}")
            continue
        for each in value if isinstance(value, list) else [value]:
            text = ",".join(map(str, each)) if isinstance(each, tuple) else str(each)
            words += [f"--{name}={text}"] if text.startswith("-") else [f"--{name}", text]
    return [*words, args.training_script, *args.training_script_args]
