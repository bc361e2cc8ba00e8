"""The translations of plugins to drivetrain's settings: each field is translated, refused, or has a reason."""

from collections.abc import Callable
from dataclasses import fields
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecision, MixedPrecisionPolicy, ShardingStrategy
from torch.distributed.fsdp.wrap import (
    ModuleWrapPolicy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)

from drivetrain_accelerate.accelerator.accelerator import Accelerator
from drivetrain_accelerate.plugins import (
    deepspeed_plugin,
    fp8_recipes,
    kwargs_handlers,
    parallelism_handlers,
    run_configuration,
    translate_fsdp,
)
from drivetrain_accelerate.plugins.deepspeed_plugin import DeepSpeedPlugin
from drivetrain_accelerate.plugins.enums import DDPCommunicationHookType as Hook
from drivetrain_accelerate.plugins.fp8_recipes import (
    AORecipeKwargs,
    FP8RecipeKwargs,
    MSAMPRecipeKwargs,
    TERecipeKwargs,
)
from drivetrain_accelerate.plugins.fsdp_plugin import FullyShardedDataParallelPlugin
from drivetrain_accelerate.plugins.kwargs_handlers import (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    TorchDynamoPlugin,
)
from drivetrain_accelerate.plugins.option_fields import (
    BECOMES,
    REFUSED,
    WITHOUT_EFFECT,
    TranslationError,
)
from drivetrain_accelerate.plugins.parallelism_config import ParallelismConfig
from drivetrain_accelerate.plugins.parallelism_handlers import (
    DeepSpeedSequenceParallelConfig,
    TorchContextParallelConfig,
    TorchTensorParallelConfig,
    TorchTensorParallelPlugin,
)
from drivetrain_accelerate.plugins.run_configuration import (
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    ProjectConfiguration,
)
from drivetrain_backends.settings import DDPSettings, FSDPSettings
from drivetrain_data.settings import DataSettings
from drivetrain_deepspeed.config import EngineRun, engine_config
from drivetrain_deepspeed.settings import DeepSpeedSettings
from drivetrain_precision.settings import PrecisionSettings

Fsdp, Ds, Ddp = FullyShardedDataParallelPlugin, DeepSpeedPlugin, DistributedDataParallelKwargs

KINDS = [
    Fsdp,
    Ds,
    Ddp,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    AutocastKwargs,
    TorchDynamoPlugin,
    DataLoaderConfiguration,
    ProjectConfiguration,
    GradientAccumulationPlugin,
    AORecipeKwargs,
    TERecipeKwargs,
]


def fates(kind: Any) -> dict[str, Any]:
    return {each.name: each.metadata for each in fields(kind)}


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_is_translated_or_refused_or_without_effect_for_a_reason(kind: Any) -> None:
    for name, said in fates(kind).items():
        assert len(said) == 1, name
        assert said.keys() <= {BECOMES, REFUSED, WITHOUT_EFFECT}, name
        reason = said.get(WITHOUT_EFFECT, "as said")
        assert len(reason) > 10 or reason.startswith("as "), name


def fsdp(**given: Any) -> Any:
    """Return the whole sections, which their own checks accept, as one."""
    section: Any = translate_fsdp.fsdp_sections(Fsdp(**given))
    FSDPSettings(**section)
    return section | translate_fsdp.fsdp_model_section(Fsdp(**given), section)


def deepspeed(**given: Any) -> Any:
    section: Any = deepspeed_plugin.deepspeed_sections(Ds(**given))
    DeepSpeedSettings(**section)
    return section["config"]


def ddp(**given: Any) -> Any:
    section: Any = kwargs_handlers.ddp_sections(Ddp(**given))
    DDPSettings(**section)
    return section


def scaler(**given: Any) -> Any:
    section: Any = kwargs_handlers.scaler_sections(GradScalerKwargs(**given))
    PrecisionSettings(**section)
    return section


def group(**given: Any) -> Any:
    handler = InitProcessGroupKwargs(**given)
    kwargs_handlers.check_group(handler, "cpu")
    return {} if handler.timeout is None else {"timeout": handler.timeout}


def data(**given: Any) -> Any:
    section: Any = run_configuration.data_sections(DataLoaderConfiguration(**given))
    DataSettings(**section)
    return section


def checkpoint(**given: Any) -> Any:
    configuration = ProjectConfiguration(**given)
    run_configuration.check_project(configuration)
    return [
        getattr(configuration, name) for name in ("project_dir", "automatic_checkpoint_naming", "total_limit")
    ]


# For each field, a value that is not the default, and what must be given beside it.
OTHER: list[tuple[Callable[..., Any], Any, dict[str, tuple[Any, dict[str, Any]]]]] = [
    (
        fsdp,
        Fsdp,
        {
            "sharding_strategy": ("SHARD_GRAD_OP", {}),
            "reshard_after_forward": (False, {"fsdp_version": 2}),
            "auto_wrap_policy": ("size_based_wrap", {"min_num_params": 3}),
            "transformer_cls_names_to_wrap": (["A"], {}),
            "min_num_params": (3, {}),
            "cpu_offload": (True, {}),
            "forward_prefetch": (True, {}),
            "activation_checkpointing": (True, {}),
            "ignored_modules": ("abc", {}),
            "param_init_fn": (len, {}),
            "activation_checkpointing_offload": (True, {"fsdp_version": 2, "activation_checkpointing": True}),
            "backward_prefetch": ("BACKWARD_POST", {}),
            "fsdp_version": (1, {}),
            "state_dict_type": ("SHARDED_STATE_DICT", {}),
            "limit_all_gathers": (False, {}),
            "use_orig_params": (True, {}),
            "sync_module_states": (True, {}),
        },
    ),
    (
        ddp,
        Ddp,
        {
            "broadcast_buffers": (False, {}),
            "bucket_cap_mb": (7, {}),
            "find_unused_parameters": (True, {}),
            "gradient_as_bucket_view": (True, {}),
            "static_graph": (True, {}),
            "comm_hook": (Hook.FP16, {}),
            "comm_state_option": ({"matrix_approximation_rank": 3}, {"comm_hook": Hook.POWER_SGD}),
            "dim": (1, {}),
            "comm_wrapper": (Hook.FP16, {}),
            "check_reduction": (True, {}),
        },
    ),
    (
        scaler,
        GradScalerKwargs,
        {
            "init_scale": (4.0, {}),
            "growth_factor": (3.0, {}),
            "backoff_factor": (0.25, {}),
            "growth_interval": (7, {}),
            "enabled": (False, {}),
        },
    ),
    (
        group,
        InitProcessGroupKwargs,
        {"timeout": (timedelta(seconds=7), {}), "backend": ("mpi", {}), "init_method": ("tcp://x:1", {})},
    ),
    (
        data,
        DataLoaderConfiguration,
        {
            "split_batches": (True, {}),
            "dispatch_batches": (True, {}),
            "even_batches": (False, {}),
            "data_seed": (3, {}),
            "non_blocking": (True, {}),
            "use_seedable_sampler": (True, {}),
            "use_stateful_dataloader": (True, {}),
        },
    ),
    (
        checkpoint,
        ProjectConfiguration,
        {
            "total_limit": (3, {"automatic_checkpoint_naming": True}),
            "automatic_checkpoint_naming": (True, {"project_dir": "x"}),
            "save_on_each_node": (True, {}),
            "logging_dir": ("x", {}),
            "iteration": (3, {}),
        },
    ),
    (
        deepspeed,
        Ds,
        {
            "gradient_accumulation_steps": (3, {}),
            "gradient_clipping": (0.5, {}),
            "zero_stage": (1, {}),
            "offload_optimizer_device": ("cpu", {}),
            "offload_param_device": ("cpu", {"zero_stage": 3}),
            "offload_optimizer_nvme_path": ("/x", {"zero_stage": 3, "offload_optimizer_device": "nvme"}),
            "offload_param_nvme_path": ("/x", {"zero_stage": 3, "offload_param_device": "nvme"}),
            "enable_msamp": (True, {}),
            "is_train_batch_min": (False, {}),
            "transformer_moe_cls_names": ("A", {}),
            "msamp_opt_level": ("O2", {}),
            "zero3_init_flag": (False, {"zero_stage": 3}),
        },
    ),
]


@pytest.mark.filterwarnings("ignore:sync_module_states")
@pytest.mark.parametrize(
    ("translate", "kind", "name", "value", "beside"),
    [(made, kind, name, *given) for made, kind, values in OTHER for name, given in values.items()],
)
def test_a_value_of_a_field_changes_the_settings_or_is_refused_as_declared(
    translate: Callable[..., Any], kind: Any, name: str, value: Any, beside: dict[str, Any]
) -> None:
    said = fates(kind)[name]
    if REFUSED in said:
        with pytest.raises(TranslationError, match=rf"\({name}=.*\(drivetrain: .*\): "):
            translate(**beside, **{name: value})
        return
    without = {key: each for key, each in beside.items() if not key.startswith("min_")}
    changes = translate(**beside, **{name: value}) != translate(**without)
    assert changes == (BECOMES in said), (name, translate(**beside, **{name: value}))


@given(
    version=st.sampled_from([1, 2]),
    policy=st.sampled_from([None, "transformer_based_wrap", "size_based_wrap", "no_wrap"]),
    names=st.sampled_from([None, ["A"], ["A", "B"]]),
    least=st.sampled_from([None, 0, 10]),
    offload=st.booleans(),
    checkpointing=st.booleans(),
)
def test_any_fsdp_plugin_gives_a_section_or_an_error(
    version: int, policy: Any, names: Any, least: Any, offload: bool, checkpointing: bool
) -> None:
    given = {
        "fsdp_version": version,
        "auto_wrap_policy": policy,
        "transformer_cls_names_to_wrap": names,
        "min_num_params": least,
        "cpu_offload": offload,
        "activation_checkpointing": checkpointing,
    }
    if least and (policy == "transformer_based_wrap" or (policy in (None, "no_wrap") and names)):
        with pytest.raises(TranslationError, match="min_num_params"):
            fsdp(**given)
        return
    section = fsdp(**given)
    assert section.get("offload") == offload
    assert section.get("activation_checkpointing", "none") == ("full" if checkpointing else "none")
    assert section.get("blocks") == (section.get("wrap") or None if checkpointing else None)
    said = tuple(names) if names else None
    if policy == "transformer_based_wrap":
        assert section.get("wrap") == said
    elif policy == "size_based_wrap":
        assert section.get("min_num_params", 0) == (least or 0)


def test_strategies() -> None:
    for theirs, ours in (
        ("FULL_SHARD", "full_shard"),
        ("NO_SHARD", "no_shard"),
        ("HYBRID_SHARD", "hybrid_shard"),
    ):
        assert fsdp(sharding_strategy=theirs)["strategy"] == ours
        assert fsdp(reshard_after_forward=theirs)["strategy"] == ours
    assert fsdp(fsdp_version=2)["strategy"] == "full_shard"
    assert fsdp(fsdp_version=2, reshard_after_forward=False)["strategy"] == "shard_grad_op"
    with pytest.raises(TranslationError, match=r"HYBRID_SHARD_ZERO2.*nothing here shards within a node"):
        fsdp(sharding_strategy="HYBRID_SHARD_ZERO2")
    with pytest.raises(TranslationError, match="contradicts reshard_after_forward"):
        fsdp(sharding_strategy="NO_SHARD", reshard_after_forward="FULL_SHARD")
    with pytest.raises(TranslationError, match="LOCAL_STATE_DICT"):
        fsdp(state_dict_type="LOCAL_STATE_DICT")
    assert fsdp(sharding_strategy=ShardingStrategy.NO_SHARD)["strategy"] == "no_shard"


def test_wrap_policies_of_torch_and_peft_are_read() -> None:
    by_class = partial(transformer_auto_wrap_policy, transformer_layer_cls={nn.Linear, nn.ReLU})
    assert fsdp(auto_wrap_policy=by_class)["wrap"] == ("Linear", "ReLU")
    assert (
        fsdp(auto_wrap_policy=partial(size_based_auto_wrap_policy, min_num_params=9))["min_num_params"] == 9
    )
    assert fsdp(auto_wrap_policy=ModuleWrapPolicy([nn.Linear]))["wrap"] == ("Linear",)
    assert fsdp()["wrap"] == fsdp(auto_wrap_policy="no_wrap")["wrap"] == ()
    assert "wrap" not in fsdp(auto_wrap_policy="transformer_based_wrap")  # the model's own blocks
    with pytest.raises(TranslationError, match="blocks are chosen by class or by size"):
        fsdp(auto_wrap_policy=len)
    peft = pytest.importorskip("peft.utils.other")
    plugin = Fsdp(auto_wrap_policy=peft.fsdp_auto_wrap_policy(Blocks()))
    assert translate_fsdp.fsdp_sections(plugin, [Blocks()])["wrap"] == ("Linear",)


class Blocks(nn.Module):
    _no_split_modules = ("Linear",)

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)


def test_offload_to_memory_that_is_not_pinned() -> None:
    section = fsdp(fsdp_version=2, cpu_offload=CPUOffloadPolicy(pin_memory=False))
    assert (section["offload"], section["pin_memory"]) == (True, False)


def test_a_policy_of_dtypes_becomes_precision() -> None:
    def sections(mode: str, **given: Any) -> Any:
        found: Any = translate_fsdp.fsdp_precision_sections(Fsdp(**given), mode)
        PrecisionSettings(**found)
        return found

    assert sections("bf16") == {}
    assert sections("bf16", mixed_precision_policy="bf16") == {"reduce_dtype": "bf16", "buffer_dtype": "bf16"}
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float16
    )
    found = sections("fp8", fsdp_version=2, mixed_precision_policy=policy)
    assert found == {"reduce_dtype": "fp32", "output_dtype": "fp16"}
    with pytest.raises(TranslationError, match=r"it computes in torch\.bfloat16.*mixed_precision='no'"):
        sections("no", mixed_precision_policy="bf16")
    odd = MixedPrecision(param_dtype=torch.bfloat16, keep_low_precision_grads=True)
    with pytest.raises(TranslationError, match="keep_low_precision_grads=True"):
        sections("bf16", mixed_precision_policy=odd)


TYPICAL: dict[str, Any] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto"}},
    "fp16": {
        "enabled": "auto",
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "initial_scale_power": 16,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "steps_per_print": 2000,
    "wall_clock_breakdown": False,
}


@pytest.mark.parametrize("mode", ["no", "bf16", "fp16"])
@pytest.mark.parametrize(
    "given", [{}, {"zero_stage": 3}, {"offload_optimizer_device": "cpu"}, {"hf_ds_config": TYPICAL}]
)
def test_the_engine_takes_the_configuration_that_is_handed_through(mode: str, given: dict[str, Any]) -> None:
    plugin = Ds(**given)
    plugin.set_mixed_precision(mode)
    section: Any = deepspeed_plugin.deepspeed_sections(plugin)
    scale: Any = deepspeed_plugin.deepspeed_precision_sections(plugin)
    run = EngineRun(
        world_size=2,
        gradient_accumulation_steps=deepspeed_plugin.deepspeed_accumulation(plugin) or 4,
        micro_batch_size=2,
        mode=mode,
        scaling=PrecisionSettings(**scale) if mode == "fp16" else None,
        num_elements=1000,
        optimizer="AdamW",
    )
    config = engine_config(DeepSpeedSettings(**section), run)
    assert config["zero_optimization"]["stage"] == plugin.zero_stage
    assert config["train_batch_size"] == 2 * 2 * 4
    if "hf_ds_config" in given:
        assert scale == {"initial_scale": 65536.0, "growth_interval": 1000, "min_scale": 1.0}


def test_fields_that_a_configuration_leaves_open_are_added_and_others_contradict() -> None:
    zero3 = {"zero_optimization": {"stage": 3}}
    assert deepspeed(hf_ds_config=zero3, gradient_clipping=0.5)["gradient_clipping"] == 0.5
    found = deepspeed(hf_ds_config=zero3, offload_param_device="cpu")
    assert found["zero_optimization"]["offload_param"] == {"device": "cpu"}
    plugin = Ds(hf_ds_config=zero3)
    plugin.zero_stage = 2
    with pytest.raises(TranslationError, match=r"zero_stage=2.*contradicts stage=3"):
        deepspeed_plugin.deepspeed_sections(plugin)
    with pytest.raises(TranslationError, match="offload_param_nvme_path='/x'"):
        deepspeed(offload_param_nvme_path="/x")
    still = Ds(hf_ds_config={**zero3, "fp16": {"enabled": True, "loss_scale": 128}})
    with pytest.raises(TranslationError, match=r"fp16\.loss_scale=128"):
        deepspeed_plugin.deepspeed_precision_sections(still)


def test_accumulation_is_the_plugins_or_open() -> None:
    assert deepspeed_plugin.deepspeed_accumulation(Ds()) is None
    assert deepspeed_plugin.deepspeed_accumulation(Ds(gradient_accumulation_steps=4)) == 4


def test_hooks_of_ddp() -> None:
    assert ddp()["communication_hook"] == "none"
    options = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 5}
    section = ddp(comm_hook=Hook.POWER_SGD, comm_state_option=options)
    assert (section["power_sgd_rank"], section["power_sgd_start_step"]) == (2, 5)
    assert not ddp(static_graph=True, find_unused_parameters=True)["find_unused_parameters"]
    with pytest.raises(TranslationError, match="say POWER_SGD"):
        ddp(comm_hook=Hook.BATCHED_POWER_SGD)
    with pytest.raises(TranslationError, match="use_error_feedback"):
        ddp(comm_hook=Hook.POWER_SGD, comm_state_option={"use_error_feedback": False})


def test_a_small_scale_may_be_as_small_as_it_begins() -> None:
    assert scaler(init_scale=0.5)["min_scale"] == 0.5


def test_the_group_is_drivetrains_own() -> None:
    assert group(backend="gloo") == group() == group(init_method="env://") == {}
    kwargs_handlers.check_group(InitProcessGroupKwargs(), "cuda")
    with pytest.raises(TranslationError, match="processes on cuda communicate by nccl"):
        kwargs_handlers.check_group(InitProcessGroupKwargs(backend="gloo"), "cuda")


def test_what_is_compiled() -> None:
    options = kwargs_handlers.compile_options
    assert options(TorchDynamoPlugin()) is None
    assert options(TorchDynamoPlugin(mode="max-autotune")) is None
    plugin = TorchDynamoPlugin(backend="eager", dynamic=False, use_regional_compilation=True)  # pyright: ignore[reportArgumentType]
    assert options(plugin) == {"backend": "eager", "fullgraph": False, "dynamic": False, "disable": False}
    assert kwargs_handlers.compiles_regions(plugin)
    assert not kwargs_handlers.compiles_regions(TorchDynamoPlugin())


def test_checkpoints_of_a_project() -> None:
    with pytest.raises(TranslationError, match="say automatic_checkpoint_naming=True too"):
        checkpoint(total_limit=2)
    for none in (0, -1):
        with pytest.raises(TranslationError, match="say 1 or more, or None to keep all"):
            checkpoint(total_limit=none, automatic_checkpoint_naming=True)


def test_dimensions() -> None:
    sections = parallelism_handlers.parallelism_sections
    assert sections(ParallelismConfig()) == {}
    assert sections(ParallelismConfig(dp_shard_size=4)) == {"strategy": "full_shard"}
    hybrid: Any = sections(ParallelismConfig(dp_shard_size=4, dp_replicate_size=2))
    assert FSDPSettings(**hybrid).shard_size == 4
    sizes = parallelism_handlers.parallel_sizes
    assert sizes(ParallelismConfig(dp_shard_size=4)) == {}
    assert sizes(ParallelismConfig(tp_size=2)) == {"data": 1, "shard": 1, "context": 1, "tensor": 2}
    both = ParallelismConfig(cp_size=2, dp_shard_size=4)
    context = {"context": 2, "tensor": 1}
    assert sizes(both) == {"data": 1, "shard": 4, **context, "context_method": "gathered"}
    by_heads = ParallelismConfig(sp_size=2, dp_shard_size=4, dp_replicate_size=3)
    assert sizes(by_heads) == {"data": 3, "shard": 4, **context, "context_method": "heads"}
    found = sizes(by_heads, partitions_all=True)
    assert found == {"data": 12, "shard": 1, **context, "context_method": "heads"}
    parallelism_handlers.check_engine_dimensions(by_heads)
    with pytest.raises(TranslationError, match=r"dp_shard_size=4.*DeepSpeed partitions over all ranks"):
        parallelism_handlers.check_engine_dimensions(ParallelismConfig(dp_shard_size=4))


def test_handlers_that_divide_attention_in_another_way_are_refused() -> None:
    ring = TorchContextParallelConfig(cp_comm_strategy="alltoall")
    with pytest.raises(TranslationError, match="'allgather' computes the same"):
        parallelism_handlers.parallel_sizes(ParallelismConfig(cp_size=2, cp_handler=ring))
    flash = DeepSpeedSequenceParallelConfig(sp_attn_implementation="flash_attention_2")
    with pytest.raises(TranslationError, match="say 'sdpa'"):
        parallelism_handlers.parallel_sizes(ParallelismConfig(sp_size=2, sp_handler=flash))


def test_older_options_of_tensor_parallelism() -> None:
    with (
        pytest.warns(FutureWarning, match=r"say parallelism_config=ParallelismConfig\(tp_size=") as told,
        pytest.raises(ValueError, match="is 2, and there are 1 processes"),
    ):
        Accelerator(cpu=True, torch_tp_plugin=TorchTensorParallelPlugin(tp_size=2))
    with pytest.warns(UserWarning, match="enable_async_tp=True overlaps nothing") as also_told:
        TorchTensorParallelConfig(enable_async_tp=True)
    assert {each.filename for each in (*told, *also_told)} == {__file__}


def test_recipes_of_torchao() -> None:
    torchao = pytest.importorskip("torchao.float8")
    recipe: Any = fp8_recipes.fp8_recipe(AORecipeKwargs())
    assert (recipe.scaling, recipe.all_gather, recipe.layers.skip_first) == ("tensorwise", True, True)
    whole: Any = fp8_recipes.fp8_recipe(AORecipeKwargs(), is_sharded=False)  # nothing is gathered there
    assert (whole.scaling, whole.all_gather) == ("tensorwise", False)
    config = torchao.Float8LinearConfig.from_recipe_name("rowwise")
    chosen: Any = fp8_recipes.fp8_recipe(
        AORecipeKwargs(config=config, module_filter_func=lambda _, name: name == "a")
    )
    assert (chosen.scaling, chosen.all_gather, chosen.layers.skip_first) == ("rowwise", False, False)
    assert chosen.layers.accept("a", nn.Linear(1, 1))
    assert not chosen.layers.accept("b", nn.Linear(1, 1))
    slow = torchao.config.Float8GemmConfig(use_fast_accum=False)
    odd = torchao.Float8LinearConfig(gemm_config_output=slow)
    with pytest.raises(TranslationError, match="tensorwise, rowwise and rowwise_with_gw_hp"):
        fp8_recipes.fp8_recipe(AORecipeKwargs(config=odd))


def test_recipes_of_transformer_engine() -> None:
    recipe: Any = fp8_recipes.fp8_recipe(TERecipeKwargs(margin=2, fp8_format="E4M3"))
    assert recipe.scaling == "delayed"
    assert recipe.options == {
        "margin": 2,
        "fp8_format": "e4m3",
        "amax_history_len": 1024,
        "amax_compute_algo": "most_recent",
    }
    mx: Any = fp8_recipes.fp8_recipe(FP8RecipeKwargs(backend="TE", use_mxfp8_block_scaling=True))
    assert mx.scaling == "mxfp8"
    exact: Any = fp8_recipes.fp8_recipe(TERecipeKwargs(override_linear_precision=(False, False, True)))
    assert exact.options["override_linear_precision"] == (False, False, True)
    for handler in (MSAMPRecipeKwargs(), FP8RecipeKwargs(backend="MSAMP")):
        with pytest.raises(TranslationError, match="MS-AMP"):
            fp8_recipes.fp8_recipe(handler)
