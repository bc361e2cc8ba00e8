"""What is written into a configuration, held against DeepSpeed's own defaults, so that none changes a run unseen."""

from typing import Any

import pytest

from drivetrain_deepspeed import DeepSpeedSettings, EngineConfigError
from drivetrain_deepspeed.config import EngineRun, engine_config, flatten
from drivetrain_deepspeed.config_checks import check_keys, known_keys
from drivetrain_precision import PrecisionSettings

# Keys that are not written, since their defaults change no result: speed, memory, observation, features that are off.
HARMLESS = {
    "zero_optimization": {
        "use_multi_rank_bucket_allreduce",
        "allgather_partitions",
        "compute_grad_norm",
        "load_from_fp32_weights",  # of DeepSpeed's own checkpoints
        "elastic_checkpoint",
        "zenflow",  # off
        "sub_group_size",
        "stage3_model_persistence_threshold",
        "stage3_max_live_parameters",
        "stage3_max_reuse_distance",
        "stage3_gather_16bit_weights_on_model_save",
        "stage3_module_granularity_threshold",
        "stage3_use_all_reduce_for_fetch_params",
        "stage3_allgather_sequential",
        "legacy_stage1",
        "round_robin_gradients",
        "parameter_alignment",
        "zero_hpz_partition_size",
        "memory_efficient_linear",
        "pipeline_loading_checkpoint",
        "override_module_apply",
        "log_trace_cache_warnings",
        "enable_sanity_checks",
        "save_muon_momentum_buffer_in_memory",
        "leaf_module",
    },
    "fp16": {
        # the engine's own scale stands still at the value that is written
        "initial_scale_power",
        "loss_scale_window",
        "hysteresis",
        "consecutive_hysteresis",
        "min_loss_scale",
        "auto_cast",  # off
    },
    "bf16": set(),
}


# At the top level: observation, features that are off; and keys of features that DeepSpeed took out and refuses.
HARMLESS_ASIDE = {
    *(
        "comet",
        "comms_logger",
        "csv_monitor",
        "dump_state",
        "log_level",
        "memory_breakdown",
        "steps_per_print",
    ),
    *("tensorboard", "timers", "wall_clock_breakdown", "wandb"),
    *("checkpoint", "datastates_ckpt"),  # of DeepSpeed's own checkpoints
    *("dataloader_drop_last", "vocabulary_size", "disable_python_gc", "disable_allgather"),
    *("compile", "data_efficiency", "expert_parallel", "hybrid_engine", "pipeline", "tensor_parallel"),
    *("seq_parallel_communication_data_type", "use_data_before_expert_parallelism", "weight_quantization"),
}
TAKEN_OUT = {
    *(
        "amp",
        "compression_training",
        "curriculum_learning",
        "eigenvalue",
        "elasticity",
        "graph_harvesting",
        "nebula",
    ),
    *("progressive_layer_drop", "quantize_training", "sparse_attention", "sparse_gradients"),
}


class Asked(dict[str, Any]):
    """A configuration that remembers which of its keys were asked for."""

    def __init__(self, given: dict[str, Any], names: set[str]) -> None:
        super().__init__(given)
        self.names = names

    def __getitem__(self, name: str) -> Any:
        self.names.add(name)
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        self.names.add(str(name))
        return super().__contains__(name)

    def get(self, name: str, default: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.names.add(name)
        return super().get(name, default)


def top_level() -> tuple[set[str], set[str], set[str]]:
    """The keys that DeepSpeed asks a configuration for, those that are written, and those that it refuses."""
    from deepspeed.runtime.config import DeepSpeedConfig

    written = engine_config(DeepSpeedSettings(), EngineRun(world_size=1, mode="bf16"))
    asked: set[str] = set()
    DeepSpeedConfig(Asked(written, asked))
    refused: set[str] = set()
    for name in asked - set(written):
        try:
            check_keys({name: {}}, "a test")
        except EngineConfigError:
            refused.add(name)
    return asked, set(written), refused


def test_every_key_of_the_top_level_is_written_or_changes_no_result(run_ranks) -> None:
    ((asked, written, refused),) = run_ranks(top_level, num_processes=1)
    assert "gradient_clipping" in asked & written
    of_a_mesh = {
        "sequence_parallel_size",
        "data_parallel_size",
    }  # asked once DeepSpeed runs, whatever tests ran before
    assert asked - written - of_a_mesh == HARMLESS_ASIDE | TAKEN_OUT
    assert refused == TAKEN_OUT


def models() -> dict[str, tuple[Any, dict[str, Any]]]:
    """DeepSpeed's sections as their models, and what is written of them over all stages and precisions."""
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    kinds = {
        "zero_optimization": DeepSpeedZeroConfig,
        "bf16": DeepSpeedBF16Config,
        "fp16": DeepSpeedFP16Config,
    }
    written: dict[str, dict[str, Any]] = {name: {} for name in kinds}
    for stage in (1, 2, 3):
        for mode in ("bf16", "fp16"):
            scaling = PrecisionSettings() if mode == "fp16" else None
            made = engine_config(
                DeepSpeedSettings(stage=stage), EngineRun(world_size=1, mode=mode, scaling=scaling)
            )
            for name in kinds:
                written[name] |= made.get(name, {})
    return {name: (kind, written[name]) for name, kind in kinds.items()}


def names_of(model: Any) -> set[str]:
    """The keys a section reads, as a file writes them; deprecated ones left out."""
    return {
        field.alias or name
        for name, field in model.model_fields.items()
        if not (field.json_schema_extra or {}).get("deprecated")
    }


def sections() -> dict[str, tuple[list[str], list[str], list[str]]]:
    """For each section: what DeepSpeed reads, what is written, what check_keys knows. Run where DeepSpeed is."""
    return {
        name: (sorted(names_of(model)), sorted(written), sorted(known_keys(name)))
        for name, (model, written) in models().items()
    }


@pytest.fixture
def found(run_ranks) -> dict[str, tuple[list[str], list[str], list[str]]]:
    return run_ranks(sections, num_processes=1)[0]


@pytest.mark.parametrize("section", HARMLESS)
def test_every_key_that_could_change_a_result_is_written(found, section: str) -> None:
    read, written, _ = found[section]
    assert set(read) - set(written) == HARMLESS[section]


@pytest.mark.parametrize("section", HARMLESS)
def test_every_key_that_deepspeed_reads_is_known(found, section: str) -> None:
    read, _, known = found[section]
    assert set(known) == set(read) - {"legacy_stage1"}


def clipping() -> tuple[float, float]:
    """DeepSpeed's own clipping where nothing is said, and what an engine of ours has."""
    from deepspeed.runtime.constants import GRADIENT_CLIPPING_DEFAULT

    made = flatten(engine_config(DeepSpeedSettings(), EngineRun(world_size=1)))
    return GRADIENT_CLIPPING_DEFAULT, made["gradient_clipping"]


def test_deepspeed_would_clip_where_nobody_asked(run_ranks) -> None:
    assert run_ranks(clipping, num_processes=1) == [(1.0, 0.0)]
