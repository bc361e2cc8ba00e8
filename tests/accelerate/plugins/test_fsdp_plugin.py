"""FullyShardedDataParallelPlugin, held against the installed one."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    FullStateDictConfig,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    StateDictType,
)

from drivetrain_accelerate.plugins.fsdp_plugin import FullyShardedDataParallelPlugin as Ours
from drivetrain_config import environ

pytest.importorskip("accelerate")
from accelerate.utils import FullyShardedDataParallelPlugin as Theirs

GIVEN: dict[str, tuple[Any, ...]] = {
    "sharding_strategy": ("full_shard", "1", "4", "NO_SHARD", "HYBRID_SHARD_ZERO2", ShardingStrategy(2)),
    "reshard_after_forward": (True, False, "true", "false", "FULL_SHARD", "SHARD_GRAD_OP", ShardingStrategy(1)),
    "backward_prefetch": ("BACKWARD_PRE", "backward_post", "NO_PREFETCH", "1"),
    "mixed_precision_policy": (
        *("fp16", "bf16", "fp32", "fp8", "no", {"param_dtype": torch.bfloat16}),
        dict.fromkeys(("param_dtype", "reduce_dtype", "buffer_dtype"), torch.bfloat16),
        dict.fromkeys(("param_dtype", "reduce_dtype", "output_dtype"), torch.float16),
        MixedPrecision(param_dtype=torch.float16),
        MixedPrecisionPolicy(param_dtype=torch.float16),
    ),
    "auto_wrap_policy": ("transformer_based_wrap", "SIZE_BASED_WRAP", "no_wrap", "other", len),
    "cpu_offload": (True, False, "true", CPUOffload(True), CPUOffloadPolicy(), OffloadPolicy()),
    "state_dict_type": ("FULL_STATE_DICT", "sharded_state_dict", "LOCAL_STATE_DICT", "3", StateDictType(1)),
    "state_dict_config": (FullStateDictConfig(),),
    "limit_all_gathers": (False,),
    "use_orig_params": (True, False),
    "forward_prefetch": (True, False),
    "activation_checkpointing": (True, False),
    "activation_checkpointing_offload": (True, False),
    "ignored_modules": ("abc",),
    "param_init_fn": (len,),
    "min_num_params": (100,),
    "transformer_cls_names_to_wrap": (["A"],),
}  # fmt: skip
VARIABLES = {
    "FSDP_SHARDING_STRATEGY": ("shard_grad_op", "2"),
    "FSDP_RESHARD_AFTER_FORWARD": ("false", "0", "true", "bogus"),
    "FSDP_OFFLOAD_PARAMS": ("true", "bogus"),
    "FSDP_BACKWARD_PREFETCH": ("BACKWARD_PRE", "NO_PREFETCH"),
    "FSDP_STATE_DICT_TYPE": ("SHARDED_STATE_DICT", "FULL_STATE_DICT"),
    "FSDP_AUTO_WRAP_POLICY": ("SIZE_BASED_WRAP", "TRANSFORMER_BASED_WRAP", "NO_WRAP", "other"),
    "FSDP_USE_ORIG_PARAMS": ("true",),
    "FSDP_FORWARD_PREFETCH": ("true",),
    "FSDP_ACTIVATION_CHECKPOINTING": ("true",),
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": ("true",),
    "FSDP_IGNORED_MODULES": ("abc",),
    "FSDP_MIN_NUM_PARAMS": ("77",),
    "FSDP_TRANSFORMER_CLS_TO_WRAP": ("A",),
}


def made(kind: Any, variables: Mapping[str, str] | None = None, **fields: Any) -> Any:
    """Return the fields of a plugin as they show; None if it is refused."""
    restored = {"FSDP_CPU_RAM_EFFICIENT_LOADING": None, **(variables or {})}
    with environ.exported(**restored):
        try:
            return {name: str(value) for name, value in vars(kind(**fields)).items()}
        except (ValueError, KeyError):
            return None


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(("name", "value"), [(name, value) for name in GIVEN for value in GIVEN[name]])
def test_a_field_becomes_what_the_real_one_makes_of_it(version: int, name: str, value: Any) -> None:
    assert made(Ours, fsdp_version=version, **{name: value}) == made(
        Theirs, fsdp_version=version, **{name: value}
    )


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(("name", "text"), [(name, text) for name in VARIABLES for text in VARIABLES[name]])
def test_a_variable_fills_the_field_that_it_fills_in_the_real_one(version: int, name: str, text: str) -> None:
    assert made(Ours, {name: text}, fsdp_version=version) == made(Theirs, {name: text}, fsdp_version=version)


@pytest.mark.parametrize("version", ["1", "2"])
def test_the_version_and_the_wrapped_blocks_come_from_the_environment(version: str) -> None:
    variables = {
        "FSDP_VERSION": version,
        "FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP",
        "FSDP_MIN_NUM_PARAMS": "77",
    }
    assert made(Ours, variables) == made(Theirs, variables)
    variables |= {"FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP", "FSDP_TRANSFORMER_CLS_TO_WRAP": "A,B"}
    assert made(Ours, variables) == made(Theirs, variables)


def test_a_version_as_text_is_that_version_and_others_are_refused() -> None:
    assert Ours(fsdp_version="2").reshard_after_forward is True
    with pytest.raises(ValueError, match="fsdp_version=3: must be 1 or 2"):
        Ours(fsdp_version=3)
    with pytest.raises(TypeError, match="unexpected keyword argument 'other'"):
        Ours(other=1)  # pyright: ignore[reportCallIssue]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)


class Model(nn.Module):
    _no_split_modules = ("Block",)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"auto_wrap_policy": "transformer_based_wrap"},
        {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Linear"]},
        {"auto_wrap_policy": "size_based_wrap", "min_num_params": 10},
        {"auto_wrap_policy": "size_based_wrap"},
        {"auto_wrap_policy": "no_wrap"},
        {"auto_wrap_policy": len},
    ],
)
@pytest.mark.parametrize("model", [Model(), nn.Linear(2, 2)])
def test_the_wrap_policy_of_a_model_is_that_of_the_real_one(
    version: int, fields: dict[str, Any], model: nn.Module
) -> None:
    found = []
    for kind in (Ours, Theirs):
        plugin: Any = kind(fsdp_version=version, **fields)
        try:
            plugin.set_auto_wrap_policy(model)
        except ValueError:
            found.append(None)
            continue
        found.append(
            (str(plugin.auto_wrap_policy), plugin.transformer_cls_names_to_wrap, plugin.min_num_params)
        )
    assert found[0] == found[1]


def test_a_class_that_the_model_does_not_have_is_named() -> None:
    plugin = Ours(auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Other"])
    with pytest.raises(ValueError, match=r"no module of .* has the class 'Other'"):
        plugin.set_auto_wrap_policy(Model())


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("mode", ["fp16", "bf16", "fp32", "fp8", "no", torch.float16, torch.uint8])
@pytest.mark.parametrize("options", [{}, {"buffer_autocast": True}])
@pytest.mark.parametrize("before", [None, "fp16"])
@pytest.mark.parametrize("override", [False, True])
@pytest.mark.default_cases("False-None-options0")
def test_the_precision_is_set_as_in_the_real_one(
    version: int, mode: Any, options: dict[str, bool], before: str | None, override: bool
) -> None:
    found = []
    for kind in (Ours, Theirs):
        plugin: Any = kind(fsdp_version=version, mixed_precision_policy=before)
        try:
            plugin.set_mixed_precision(mode, override=override, **options)
        except ValueError:
            found.append("refused")
        else:
            found.append(plugin.mixed_precision_policy)
    assert found[0] == found[1]


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    "form", ["FULL_STATE_DICT", "SHARDED_STATE_DICT", StateDictType.SHARDED_STATE_DICT, None]
)
def test_the_form_of_state_dicts_is_set_as_in_the_real_one(version: int, form: Any) -> None:
    found = []
    for kind in (Ours, Theirs):
        plugin: Any = kind(fsdp_version=version)
        plugin.set_state_dict_type(form)
        found.append((plugin.state_dict_type, plugin.state_dict_config, plugin.optim_state_dict_config))
    assert found[0] == found[1]


def test_efficient_loading_is_told_to_transformers() -> None:
    with environ.exported(FSDP_CPU_RAM_EFFICIENT_LOADING=None):
        Ours(fsdp_version=2, cpu_ram_efficient_loading=True)
        assert environ.read("FSDP_CPU_RAM_EFFICIENT_LOADING") == "True"
        assert Ours(fsdp_version=2).cpu_ram_efficient_loading
        with pytest.warns(UserWarning, match="sync_module_states cannot be False"):
            plugin = Ours(fsdp_version=1, cpu_ram_efficient_loading=True)
    assert plugin.sync_module_states
    assert plugin.param_init_fn is not None
    with torch.device("meta"):
        layer = nn.Linear(2, 2)
    plugin.param_init_fn(layer)
    assert not layer.weight.is_meta


def test_the_old_word_is_told_of_once_for_all_ranks(caplog: pytest.LogCaptureFixture) -> None:
    ranks = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for rank in ("0", "1"):
        with environ.exported(RANK=rank, LOCAL_RANK=rank, **ranks):
            Ours(fsdp_version=1, sharding_strategy="FULL_SHARD")
    assert [record.getMessage() for record in caplog.records] == [
        "sharding_strategy is the word of old versions for reshard_after_forward"
    ]


@pytest.mark.slow
def test_transformers_makes_it_from_training_arguments() -> None:
    transformers = pytest.importorskip("transformers")
    code = {"fsdp": "full_shard auto_wrap", "fsdp_config": {"transformer_layer_cls_to_wrap": ["A", "B"]}}
    with environ.exported(FSDP_CPU_RAM_EFFICIENT_LOADING=None, ACCELERATE_USE_FSDP=None):
        arguments = transformers.TrainingArguments(output_dir="x", use_cpu=True, report_to=[], **code)
        given = arguments.fsdp_plugin_args
        assert made(Ours, **given) == made(Theirs, **{**given, "transformer_cls_names_to_wrap": ["A", "B"]})
