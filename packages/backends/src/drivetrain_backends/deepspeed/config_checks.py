"""Checks of a DeepSpeed configuration: the keys that 0.19 reads, and values that it drops or applies wrongly.

DeepSpeed silently drops other keys, such as misspelt ones.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from drivetrain_backends.errors import EngineConfigError
from drivetrain_messages import suggest

# None for single values, and for sections that are free or that DeepSpeed checks itself.
_ENGINE: dict[str, frozenset[str] | None] = {
    "train_batch_size": None,
    "train_micro_batch_size_per_gpu": None,
    "gradient_accumulation_steps": None,
    "managed_gradient_accumulation": None,
    "gradient_clipping": None,
    "gradient_allreduce_op": None,
    "gradient_predivide_factor": None,
    "prescale_gradients": None,
    "communication_data_type": None,
    "seq_parallel_communication_data_type": None,
    "data_types": frozenset({"grad_accum_dtype", "param_dtype", "buffer_dtype", "keep_in_fp32_modules"}),
    "optimizer": frozenset({"type", "params", "legacy_fusion"}),
    "scheduler": frozenset({"type", "params"}),
    "fp16": frozenset(
        {
            "enabled",
            "auto_cast",
            "loss_scale",
            "initial_scale_power",
            "loss_scale_window",
            "hysteresis",
            "consecutive_hysteresis",
            "min_loss_scale",
            "fp16_master_weights_and_grads",
        }
    ),
    "bf16": frozenset(
        {
            "enabled",
            "immediate_grad_update",
            "check_grad_overflow",
            "bf16_master_weights_and_grads",
            "bf16_optimizer_states",
        }
    ),
    "torch_autocast": frozenset({"enabled", "dtype", "lower_precision_safe_modules"}),
    "zero_allow_untested_optimizer": None,
    "zero_force_ds_cpu_optimizer": None,
    "aio": frozenset(
        {
            "block_size",
            "queue_depth",
            "intra_op_parallelism",
            "single_submit",
            "overlap_events",
            "use_gds",
        }
    ),
    "activation_checkpointing": frozenset(
        {
            "partition_activations",
            "cpu_checkpointing",
            "contiguous_memory_optimization",
            "number_checkpoints",
            "synchronize_checkpoint_boundary",
            "profile",
        }
    ),
}
# Monitoring, and features whose sections DeepSpeed reads separately.
_ASIDE = frozenset(
    {
        "steps_per_print",
        "wall_clock_breakdown",
        "memory_breakdown",
        "dump_state",
        "disable_python_gc",
        "log_level",
        "timers",
        "flops_profiler",
        "comms_logger",
        "tensorboard",
        "wandb",
        "csv_monitor",
        "comet",
        "autotuning",
        "hybrid_engine",
        "data_efficiency",
        "checkpoint",
        "compile",
        "tensor_parallel",
        "expert_parallel",
        "sequence_parallel_size",
        "data_parallel_size",
        "use_data_before_expert_parallelism",
        "weight_quantization",
        "dataloader_drop_last",
        "disable_allgather",
        "vocabulary_size",
        "pipeline",
        "datastates_ckpt",
    }
)
_OFFLOAD = frozenset(
    {
        "device",
        "nvme_path",
        "buffer_count",
        "buffer_size",
        "max_in_cpu",
        "pin_memory",
        "pipeline_read",
        "pipeline_write",
        "fast_init",
        "ratio",
        "super_offload",
        "cpuadam_cores_perc",
    }
)
_ZERO = frozenset(
    {
        "stage",
        "contiguous_gradients",
        "reduce_scatter",
        "reduce_bucket_size",
        "use_multi_rank_bucket_allreduce",
        "allgather_partitions",
        "allgather_bucket_size",
        "overlap_comm",
        "compute_grad_norm",
        "load_from_fp32_weights",
        "elastic_checkpoint",
        "offload_param",
        "offload_optimizer",
        "zenflow",
        "sub_group_size",
        "stage3_prefetch_bucket_size",
        "stage3_param_persistence_threshold",
        "stage3_model_persistence_threshold",
        "stage3_max_live_parameters",
        "stage3_max_reuse_distance",
        "stage3_gather_16bit_weights_on_model_save",
        "stage3_module_granularity_threshold",
        "stage3_use_all_reduce_for_fetch_params",
        "stage3_allgather_sequential",
        "ignore_unused_parameters",
        "round_robin_gradients",
        "parameter_alignment",
        "zero_hpz_partition_size",
        "zero_quantized_weights",
        "zero_quantized_nontrainable_weights",
        "zero_quantized_gradients",
        "memory_efficient_linear",
        "pipeline_loading_checkpoint",
        "override_module_apply",
        "log_trace_cache_warnings",
        "enable_sanity_checks",
        "save_muon_momentum_buffer_in_memory",
        "leaf_module",
    }
)
_STAGES = (0, 1, 2, 3)
_ELSEWHERE = {
    "scheduler": "build it from torch.optim.lr_scheduler and pass it to prepare(), which steps it with the optimizer",
    "pipeline": "DeepSpeed reads it for its PipelineModule alone, which is not trained here",
    "tensor_parallel": "DeepSpeed's tensor parallelism is not trained with here",
}


def check_keys(given: Mapping[str, Any], where: str) -> None:
    """Refuse keys that DeepSpeed does not read."""
    _check(given, {*_ENGINE, *_ASIDE, "zero_optimization"}, where, "")
    for name, allowed in _ENGINE.items():
        if allowed is not None and isinstance(section := given.get(name), Mapping):
            _check(section, allowed, where, f"{name}.")
    zero = given.get("zero_optimization", {})
    if not isinstance(zero, Mapping):
        raise EngineConfigError(f"{where}: zero_optimization={zero!r}: must be an object with a stage")
    _check(zero, _ZERO, where, "zero_optimization.")
    for name in ("offload_param", "offload_optimizer"):
        if isinstance(section := zero.get(name), Mapping):
            _check(section, _OFFLOAD, where, f"zero_optimization.{name}.")


def _check(section: Mapping[str, Any], allowed: Iterable[str], where: str, prefix: str) -> None:
    for name in section:
        if name not in allowed:
            hint = suggest(name, allowed, show=lambda near: f"{prefix}{near}") or "; take it out"
            raise EngineConfigError(f"{where}: {prefix}{name} is nothing that DeepSpeed reads{hint}")


def check_possible(flat: Mapping[str, Any], mode: str, world_size: int) -> None:
    """Refuse a configuration that DeepSpeed would not apply, or not correctly."""
    stage = flat["zero_optimization.stage"]
    if stage not in _STAGES:
        raise EngineConfigError(f"zero_optimization.stage={stage!r}: must be 0, 1, 2 or 3")
    if stage == 0 and mode != "no":
        raise EngineConfigError(
            f"deepspeed.stage=0 with models that compute in {mode}: DeepSpeed adds gradients up in {mode} there; say "
            "stage 1, which adds them up in fp32, or backend='ddp'"
        )
    for section, instead in _ELSEWHERE.items():
        if any(name.split(".")[0] == section for name in flat):
            raise EngineConfigError(f"the DeepSpeed configuration has a section {section}: {instead}")
    clipping = flat["gradient_clipping"]
    if not isinstance(clipping, int | float) or isinstance(clipping, bool) or not clipping >= 0:
        raise EngineConfigError(f"gradient_clipping={clipping!r}: must be a norm, and 0 clips nothing")
    _check_batch_sizes(flat, world_size)
    for name, where, stages in (
        ("offload_optimizer", "cpu", (1, 2, 3)),
        ("offload_optimizer", "nvme", (3,)),
        ("offload_param", "cpu", (3,)),
        ("offload_param", "nvme", (3,)),
    ):
        _check_offload(flat, name, where, stages)


def _check_batch_sizes(flat: Mapping[str, Any], world_size: int) -> None:
    whole = flat["train_batch_size"]
    micro, windows = flat["train_micro_batch_size_per_gpu"], flat["gradient_accumulation_steps"]
    if whole != micro * windows * world_size:
        raise EngineConfigError(
            f"train_batch_size={whole!r} is not train_micro_batch_size_per_gpu={micro!r} x "
            f"gradient_accumulation_steps={windows!r} x {world_size} processes; make them agree, or write "
            '"auto" for one of the first two'
        )


def _check_offload(flat: Mapping[str, Any], name: str, where: str, stages: tuple[int, ...]) -> None:
    prefix, stage = f"zero_optimization.{name}", flat["zero_optimization.stage"]
    if flat.get(f"{prefix}.device", "none") != where:
        return
    if stage not in stages:
        allowed = " or ".join(map(str, stages))
        raise EngineConfigError(f"{name} to {where} in stage {stage}: it takes stage {allowed}")
    if where == "nvme" and flat.get(f"{prefix}.nvme_path") is None:
        raise EngineConfigError(f"{name} to nvme without a folder: say nvme_path, on that disk")
