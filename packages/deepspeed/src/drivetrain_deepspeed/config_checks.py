"""Checks of a DeepSpeed configuration: the keys that 0.19 reads, and values that 0.19 drops or applies wrongly.

DeepSpeed silently drops all other keys, such as misspelt keys.
"""

from collections.abc import Mapping
from typing import Any

from drivetrain_deepspeed.errors import EngineConfigError
from drivetrain_messages import suggest

# The keys that DeepSpeed reads in each section, "" being the top level. It checks further sections itself, if at all.
_OFFLOAD = """
    device nvme_path buffer_count buffer_size max_in_cpu pin_memory pipeline_read pipeline_write
    fast_init ratio super_offload cpuadam_cores_perc
"""
_SECTIONS = {
    "": """
        train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps
        managed_gradient_accumulation gradient_clipping gradient_allreduce_op
        gradient_predivide_factor prescale_gradients communication_data_type
        seq_parallel_communication_data_type data_types optimizer scheduler fp16 bf16 torch_autocast
        zero_allow_untested_optimizer zero_force_ds_cpu_optimizer aio activation_checkpointing
        zero_optimization steps_per_print wall_clock_breakdown memory_breakdown dump_state
        disable_python_gc log_level timers flops_profiler comms_logger tensorboard wandb csv_monitor
        comet autotuning hybrid_engine data_efficiency checkpoint compile tensor_parallel
        expert_parallel sequence_parallel_size data_parallel_size use_data_before_expert_parallelism
        weight_quantization dataloader_drop_last disable_allgather vocabulary_size pipeline
        datastates_ckpt
        """,
    "data_types": "grad_accum_dtype param_dtype buffer_dtype keep_in_fp32_modules",
    "optimizer": "type params legacy_fusion",
    "scheduler": "type params",
    "fp16": """
        enabled auto_cast loss_scale initial_scale_power loss_scale_window hysteresis
        consecutive_hysteresis min_loss_scale fp16_master_weights_and_grads
        """,
    "bf16": """
        enabled immediate_grad_update check_grad_overflow bf16_master_weights_and_grads
        bf16_optimizer_states
        """,
    "torch_autocast": "enabled dtype lower_precision_safe_modules",
    "aio": "block_size queue_depth intra_op_parallelism single_submit overlap_events use_gds",
    "activation_checkpointing": """
        partition_activations cpu_checkpointing contiguous_memory_optimization number_checkpoints
        synchronize_checkpoint_boundary profile
        """,
    "zero_optimization": """
        stage contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce
        allgather_partitions allgather_bucket_size overlap_comm compute_grad_norm
        load_from_fp32_weights elastic_checkpoint offload_param offload_optimizer zenflow
        sub_group_size stage3_prefetch_bucket_size stage3_param_persistence_threshold
        stage3_model_persistence_threshold stage3_max_live_parameters stage3_max_reuse_distance
        stage3_gather_16bit_weights_on_model_save stage3_module_granularity_threshold
        stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential ignore_unused_parameters
        round_robin_gradients parameter_alignment zero_hpz_partition_size zero_quantized_weights
        zero_quantized_nontrainable_weights zero_quantized_gradients memory_efficient_linear
        pipeline_loading_checkpoint override_module_apply log_trace_cache_warnings
        enable_sanity_checks save_muon_momentum_buffer_in_memory leaf_module
        """,
    "zero_optimization.offload_param": _OFFLOAD,
    "zero_optimization.offload_optimizer": _OFFLOAD,
}
_OFFLOADS = (  # what goes where in which stages
    ("offload_optimizer", "cpu", (1, 2, 3)),
    ("offload_optimizer", "nvme", (3,)),
    ("offload_param", "cpu", (3,)),
    ("offload_param", "nvme", (3,)),
)
_ELSEWHERE = {
    "scheduler": "build it from torch.optim.lr_scheduler and pass it to prepare(), which steps it with the optimizer",
    "pipeline": "DeepSpeed reads it for its PipelineModule alone, which is not trained here",
    "tensor_parallel": "DeepSpeed's tensor parallelism is not trained with here",
}


def check_keys(given: Mapping[str, Any], where: str) -> None:
    """Refuse keys that DeepSpeed does not read."""
    if not isinstance(zero := given.get("zero_optimization", {}), Mapping):
        raise EngineConfigError(f"{where}: zero_optimization={zero!r}: must be an object with a stage")
    for section in _SECTIONS:
        found: Any = given
        for part in filter(None, section.split(".")):
            found = found.get(part, {})
        known = known_keys(section)
        for name in found if isinstance(found, Mapping) else ():
            if name not in known:
                prefix = f"{section}." if section else ""
                hint = (
                    suggest(name, known, show=lambda near, prefix=prefix: f"{prefix}{near}")
                    or "; take it out"
                )
                raise EngineConfigError(f"{where}: {prefix}{name} is nothing that DeepSpeed reads{hint}")


def known_keys(section: str) -> list[str]:
    """Return the keys that DeepSpeed reads in a section, given by its dotted name."""
    return _SECTIONS[section].split()


def check_possible(flat: Mapping[str, Any], mode: str, world_size: int) -> None:
    """Refuse a configuration that DeepSpeed would drop or apply wrongly."""
    stage = flat["zero_optimization.stage"]
    if stage not in (0, 1, 2, 3):
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
    whole = flat["train_batch_size"]
    micro, windows = flat["train_micro_batch_size_per_gpu"], flat["gradient_accumulation_steps"]
    if whole != micro * windows * world_size:
        raise EngineConfigError(
            f"train_batch_size={whole!r} is not train_micro_batch_size_per_gpu={micro!r} x "
            f"gradient_accumulation_steps={windows!r} x {world_size} processes; make them agree, or write "
            '"auto" for one of the first two'
        )
    for name, where, stages in _OFFLOADS:
        prefix = f"zero_optimization.{name}"
        if flat.get(f"{prefix}.device", "none") != where:
            continue
        if stage not in stages:
            allowed = " or ".join(map(str, stages))
            raise EngineConfigError(f"{name} to {where} in stage {stage}: it takes stage {allowed}")
        if where == "nvme" and flat.get(f"{prefix}.nvme_path") is None:
            raise EngineConfigError(f"{name} to nvme without a folder: say nvme_path, on that disk")
