"""The plugins of compilation, fp8, parallelism and quantisation, held against the installed ones."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from drivetrain_accelerate.plugins import (
    fp8_recipes,
    kwargs_handlers,
    parallelism_config,
    parallelism_handlers,
    quantization_config,
)
from drivetrain_config import environ

pytest.importorskip("accelerate")
from accelerate.utils import dataclasses as real

from accelerate import parallelism_config as real_parallelism

COMPILE: list[tuple[dict[str, Any], dict[str, str]]] = [
    ({}, {}),
    ({"backend": "inductor"}, {}),
    ({"backend": "EAGER", "mode": "max-autotune", "fullgraph": True}, {}),
    ({"backend": "EAGER", "dynamic": False, "options": {"a": 1}}, {}),
    ({"backend": "bogus"}, {}),
    ({"disable": True, "use_regional_compilation": True}, {"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}),
    ({}, {"ACCELERATE_DYNAMO_MODE": "reduce-overhead", "ACCELERATE_DYNAMO_USE_FULLGRAPH": "1"}),
    ({}, {"ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "true", "ACCELERATE_DYNAMO_USE_DYNAMIC": "false"}),
    ({"fullgraph": False}, {"ACCELERATE_DYNAMO_USE_FULLGRAPH": "1"}),
    ({}, {"ACCELERATE_DYNAMO_USE_FULLGRAPH": "bad"}),
]
TENSOR: list[tuple[dict[str, Any], dict[str, str]]] = [({}, {}), ({"tp_size": 2}, {})]
CONTEXT: list[tuple[dict[str, Any], dict[str, str]]] = [
    ({}, {}),
    ({"cp_comm_strategy": "alltoall"}, {}),
    ({"cp_comm_strategy": "bad"}, {}),
    ({}, {"PARALLELISM_CONFIG_CP_COMM_STRATEGY": "alltoall"}),
]
SEQUENCE: list[tuple[dict[str, Any], dict[str, str]]] = [
    ({}, {}),
    ({"sp_seq_length": 3}, {}),
    ({"sp_seq_length_is_variable": False}, {}),
    ({"sp_seq_length": 4, "sp_seq_length_is_variable": False}, {}),
    ({}, {"PARALLELISM_CONFIG_SP_SEQ_LENGTH": "5", "PARALLELISM_CONFIG_SP_SEQ_LENGTH_IS_VARIABLE": "false"}),
    ({}, {"PARALLELISM_CONFIG_SP_SEQ_LENGTH": "5"}),
    *(
        ({"sp_attn_implementation": name}, {})
        for name in ("sdpa", "eager", "flash_attention_3", "paged", "kernels-community/flash-attn2")
    ),
    ({}, {"PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION": "sdpa"}),
]
QUANTISED: list[tuple[dict[str, Any], dict[str, str]]] = [
    (fields, {})
    for fields in (
        *({}, {"load_in_8bit": True}, {"load_in_4bit": True}, {"load_in_4bit": True, "load_in_8bit": True}),
        *({"load_in_8bit": "x"}, {"load_in_8bit": True, "llm_int8_threshold": "x"}),
        *({"load_in_4bit": True, "bnb_4bit_quant_type": kind} for kind in ("nf4", "bad", 1)),
        *(
            {"load_in_4bit": True, "bnb_4bit_compute_dtype": kind}
            for kind in ("bf16", "bad", torch.float16, 3)
        ),
        *({"load_in_8bit": True, "torch_dtype": kind} for kind in ("bf16", "bad", torch.float32)),
        *({"load_in_8bit": True, "skip_modules": names} for names in ("x", ["x"])),
        {"load_in_4bit": True, "bnb_4bit_use_double_quant": 1},
        {"load_in_8bit": True, "keep_in_fp32_modules": "x"},
    )
]
CASES = [
    (ours, getattr(real, ours.__name__), fields, variables)
    for ours, cases in (
        (kwargs_handlers.TorchDynamoPlugin, COMPILE),
        (parallelism_handlers.TorchTensorParallelPlugin, TENSOR),
        (parallelism_handlers.TorchTensorParallelConfig, [({}, {})]),
        (parallelism_handlers.TorchContextParallelConfig, CONTEXT),
        (parallelism_handlers.DeepSpeedSequenceParallelConfig, SEQUENCE),
        (quantization_config.BnbQuantizationConfig, QUANTISED),
        (
            fp8_recipes.MSAMPRecipeKwargs,
            [({}, {}), ({"opt_level": "O3"}, {}), ({}, {"ACCELERATE_FP8_OPT_LEVEL": "O1"})],
        ),
    )
    for fields, variables in cases
]


def made(kind: Any, fields: Mapping[str, Any], variables: Mapping[str, str]) -> Any:
    with environ.exported(**variables):
        try:
            plugin = kind(**fields)
        except (ValueError, TypeError):
            return None
    methods = [getattr(plugin, name)() for name in ("to_dict", "to_kwargs") if hasattr(plugin, name)]
    return {
        name: value if isinstance(value, dict) else str(value) for name, value in vars(plugin).items()
    }, methods


@pytest.mark.parametrize(("ours", "theirs", "fields", "variables"), CASES)
def test_fields_and_variables_become_what_the_real_one_makes_of_them(
    ours: Any, theirs: Any, fields: dict[str, Any], variables: dict[str, str]
) -> None:
    assert made(ours, fields, variables) == made(theirs, fields, variables)


PROPERTIES = """
    dp_dim_names non_dp_dim_names dp_shard_cp_dim_names dp_cp_dim_names fsdp_dim_names active_mesh_dims total_size
    non_data_parallel_size data_parallel_size dp_replicate_enabled dp_shard_enabled tp_enabled cp_enabled sp_enabled
    cp_backend sp_backend tp_handler cp_handler sp_handler
"""
SIZES: list[dict[str, Any]] = [
    {},
    *({f"{name}_size": size} for name in ("dp_replicate", "dp_shard", "tp", "cp", "sp") for size in (2, 0)),
    {"dp_replicate_size": 2, "dp_shard_size": 2, "tp_size": 2, "cp_size": 2},
    {"dp_replicate_size": 2, "dp_shard_size": 2, "sp_size": 2},
    {"dp_replicate_size": 2, "tp_size": 2},
    {"cp_size": 2, "sp_size": 2},
    {"cp_backend": "x"},
]  # fmt: skip


@pytest.mark.parametrize("sizes", SIZES)
def test_sizes_give_the_axes_of_the_real_one(sizes: dict[str, Any]) -> None:
    found: list[Any] = []
    for kind in (parallelism_config.ParallelismConfig, real_parallelism.ParallelismConfig):
        try:
            made: Any = kind(**sizes)
        except ValueError:
            found.append("refused")
            continue
        found.append({name: str(getattr(made, name)) for name in PROPERTIES.split()})
    assert found[0] == found[1]


def test_sizes_come_from_the_environment_and_can_be_written_as_json() -> None:
    with environ.exported(PARALLELISM_CONFIG_DP_SHARD_SIZE="4", PARALLELISM_CONFIG_TP_SIZE="2"):
        config = parallelism_config.ParallelismConfig()
    assert (config.dp_shard_size, config.tp_size) == (4, 2)
    assert config.to_json()["tp_handler"] == {"enable_async_tp": False}
    assert "total_size=8" in repr(config)
    with pytest.raises(ValueError, match="name the mesh's kind of device"):
        config.get_device_mesh()


def test_a_run_of_one_process_has_no_mesh() -> None:
    assert parallelism_config.ParallelismConfig().get_device_mesh("cpu") is None


@pytest.mark.filterwarnings("ignore:Slicing a flattened dim")  # torch 2.15
@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes", [{"dp_replicate_size": 2, "dp_shard_size": 4, "cp_size": 2}, {"dp_shard_size": 16}]
)
def test_the_mesh_is_that_of_the_real_one(sizes: dict[str, int]) -> None:
    from torch import distributed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", rank=0, world_size=16, store=FakeStore())
    try:
        found = []
        for kind in (parallelism_config.ParallelismConfig, real_parallelism.ParallelismConfig):
            mesh: Any = kind(**sizes).get_device_mesh("cpu")
            joint = [mesh[name].mesh.tolist() for name in ("dp", "dp_shard_cp", "dp_cp")]
            found.append((mesh.mesh_dim_names, mesh.mesh.tolist(), joint))
        assert found[0] == found[1]
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize("fields", [{}, {"pad_inner_dim": False}, {"enable_fsdp_float8_all_gather": False}])
def test_torchaos_configuration_is_made_as_by_the_real_one(fields: dict[str, bool]) -> None:
    pytest.importorskip("torchao")
    variables = {"ACCELERATE_FP8_PAD_INNER_DIM": "false"}
    for given in ({}, variables):
        assert made(fp8_recipes.AORecipeKwargs, fields, given) == made(real.AORecipeKwargs, fields, given)


def test_transformer_engines_options_are_filled_and_checked() -> None:
    # The real one wants the library to be installed; these are its values where it is.
    found = fp8_recipes.TERecipeKwargs()
    assert vars(found) == {
        "use_autocast_during_eval": False,
        "margin": 0,
        "interval": 1,
        "fp8_format": "HYBRID",
        "amax_history_len": 1024,
        "amax_compute_algo": "most_recent",
        "override_linear_precision": (False, False, False),
        "use_mxfp8_block_scaling": False,
    }
    variables = {"ACCELERATE_FP8_FORMAT": "e4m3", "ACCELERATE_FP8_OVERRIDE_WGRAD": "true"}
    with environ.exported(**variables, ACCELERATE_FP8_BACKEND="te"):
        old = fp8_recipes.FP8RecipeKwargs()
    assert (old.fp8_format, old.override_linear_precision, old.backend) == (
        "E4M3",
        (False, False, True),
        "TE",
    )
    for wrong in ({"fp8_format": "bad"}, {"amax_compute_algo": "bad"}, {"backend": "AO"}):
        with pytest.raises(ValueError, match=f"`{next(iter(wrong))}` must be one of"):
            fp8_recipes.FP8RecipeKwargs(**wrong)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("name", "variables"),
    [
        (
            "TorchDynamoPlugin",
            {"ACCELERATE_DYNAMO_BACKEND": "inductor", "ACCELERATE_DYNAMO_MODE": "max-autotune"},
        ),
        ("TorchDynamoPlugin", {"ACCELERATE_DYNAMO_USE_FULLGRAPH": "1"}),
        ("AORecipeKwargs", {"ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER": "false"}),
    ],
)
def test_what_a_variable_says_is_no_default(name: str, variables: dict[str, str]) -> None:
    with environ.exported(**variables):
        mine, theirs = ({**kwargs_handlers.__dict__, **fp8_recipes.__dict__}[name](), getattr(real, name)())
        assert mine.to_kwargs() == theirs.to_kwargs() != {}


def test_variables_of_transformer_engine_are_no_defaults_either() -> None:
    with environ.exported(ACCELERATE_FP8_MARGIN="3"):
        assert fp8_recipes.TERecipeKwargs().to_kwargs() == {"margin": 3}
        assert fp8_recipes.TERecipeKwargs(margin=0).to_kwargs() == {}
