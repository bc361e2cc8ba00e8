"""DeepSpeedPlugin, held against the installed one."""

import json
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from drivetrain_accelerate.plugins.deepspeed_config import HfDeepSpeedConfig
from drivetrain_accelerate.plugins.deepspeed_plugin import DeepSpeedPlugin as Ours
from drivetrain_config import environ
from optional_modules import skip_without

pytest.importorskip("accelerate")
from accelerate.utils import DeepSpeedPlugin as Theirs

skip_without("deepspeed")

CONFIG: dict[str, Any] = {
    "train_batch_size": "auto",
    "section": {"inner": {"auto": "auto", "number": 5}},
    "gradient_accumulation_steps": "auto",
    "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}},
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
}
FIELDS: list[dict[str, Any]] = [
    {},
    {"zero_stage": 0},
    {"zero_stage": 3},
    {"zero_stage": 3, "zero3_init_flag": False},
    {"gradient_accumulation_steps": 4, "gradient_clipping": 1.0},
    {"offload_optimizer_device": "cpu"},
    {
        "zero_stage": 3,
        "offload_param_device": "nvme",
        "offload_param_nvme_path": "/y",
        "offload_optimizer_device": "nvme",
        "offload_optimizer_nvme_path": "/x",
    },
    {"zero3_save_16bit_model": True},
    {"enable_msamp": True},
    {"transformer_moe_cls_names": "A"},
]
CONFIGS: list[dict[str, Any] | None] = [
    None,
    CONFIG,
    {"zero_optimization": {}},
    {"zero_optimization": {"stage": 2}, "steps_per_print": 7},
    {"zero_optimization": {"stage": "auto", "offload_param": {"device": "auto", "nvme_path": "auto"}}},
    {"zero_optimization": {"stage": 2, "offload_param": {"device": "nvme", "nvme_path": "/q"}}},
    {"gradient_accumulation_steps": 3},
]
VARIABLES = [
    {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"},
    {"ACCELERATE_GRADIENT_CLIPPING": "0.5"},
    {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "3", "ACCELERATE_DEEPSPEED_ZERO3_INIT": "true"},
    {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "3", "ACCELERATE_DEEPSPEED_ZERO3_INIT": "false"},
    {"ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu"},
    {
        "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "nvme",
        "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH": "/x",
    },
    {"ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH": "/x"},
    {"ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "true"},
    {"ACCELERATE_DEEPSPEED_CONFIG_FILE": "none"},
    {"ACCELERATE_FP8_BACKEND": "MSAMP", "ACCELERATE_FP8_OPT_LEVEL": "O2"},
]


def made(kind: Any, variables: Mapping[str, str] | None = None, **fields: Any) -> Any:
    """Return the fields of a plugin; None if it is refused."""
    with environ.exported(**(variables or {})):
        try:
            plugin = kind(**deepcopy(fields))
        except ValueError:
            return None
    found = dict(vars(plugin))
    assert found["hf_ds_config"].config is found["deepspeed_config"]
    return {**found, "hf_ds_config": None}


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("fields", FIELDS)
def test_fields_and_configuration_become_what_the_real_one_makes_of_them(
    config: dict[str, Any] | None, fields: dict[str, Any]
) -> None:
    if (fields.get("zero_stage") == 3 and config == {"zero_optimization": {}}) or (
        "enable_msamp" in fields and config == CONFIG
    ):
        pytest.skip(
            "the stage of the field counts here; MS-AMP is refused in every stage when it is translated"
        )
    assert made(Ours, hf_ds_config=config, **fields) == made(Theirs, hf_ds_config=config, **fields)


@pytest.mark.filterwarnings("ignore:.*ero3.*nit.*of stage 3 alone", "ignore:DeepSpeed Zero3 Init flag")
@pytest.mark.parametrize("variables", VARIABLES)
@pytest.mark.parametrize("config", CONFIGS[:5])
def test_variables_fill_the_fields_that_they_fill_in_the_real_one(
    variables: dict[str, str], config: dict[str, Any] | None
) -> None:
    if "ACCELERATE_FP8_BACKEND" in variables and config == CONFIG:
        pytest.skip("MS-AMP is refused in every stage when it is translated")
    if "ACCELERATE_DEEPSPEED_ZERO_STAGE" in variables and config == {"zero_optimization": {}}:
        variables = {**variables, "ACCELERATE_DEEPSPEED_ZERO3_INIT": "false"}
    assert made(Ours, variables, hf_ds_config=config) == made(Theirs, variables, hf_ds_config=config)


def test_the_flag_of_stage_3_is_taken_back_in_others() -> None:
    with pytest.warns(UserWarning, match="zero3_init_flag is of stage 3 alone"):
        assert not Ours(zero3_init_flag=True).zero3_init_flag


def test_a_configuration_is_read_from_a_file_a_path_a_variable_and_the_object(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(CONFIG))
    variables = {"ACCELERATE_DEEPSPEED_CONFIG_FILE": str(file)}
    expected = made(Theirs, hf_ds_config=str(file))
    assert made(Ours, hf_ds_config=str(file)) == expected
    assert made(Ours, variables) == made(Theirs, variables) == expected
    assert made(Ours, hf_ds_config=file) == expected  # Accelerate takes the default configuration for a Path
    own = HfDeepSpeedConfig(CONFIG)
    assert Ours(hf_ds_config=own).hf_ds_config is own


def test_a_launchers_fields_beside_a_configuration_are_refused() -> None:
    for said in ("zero_stage,gradient_clipping", "zero3_init_flag"):
        variables = {"ACCELERATE_CONFIG_DS_FIELDS": said}
        assert made(Ours, variables) == made(Theirs, variables)
    with (
        environ.exported(ACCELERATE_CONFIG_DS_FIELDS="zero_stage"),
        pytest.raises(ValueError, match="zero_stage: the launcher's file sets"),
    ):
        Ours(hf_ds_config=CONFIG)


@pytest.mark.parametrize(
    "name", ["train_batch_size", "section.inner.auto", "section.inner.number", "no.such", "none"]
)
def test_values_are_asked_for_and_filled_as_in_the_real_one(name: str) -> None:
    found = []
    for kind in (Ours, Theirs):
        plugin: Any = kind(hf_ds_config=deepcopy(CONFIG))
        asked = (plugin.is_auto(name), plugin.get_value(name), plugin.get_value(name, 7))
        mismatches: list[str] = []
        plugin.fill_match(name, mismatches, **{name: 3})
        plugin.fill_match(name, mismatches, must_match=False, **{name: 4})
        found.append((asked, mismatches, plugin.deepspeed_config))
        if plugin.is_auto("train_batch_size"):
            with pytest.raises(ValueError, match="train_batch_size"):
                plugin.fill_match("train_batch_size")
    assert found[0] == found[1]


@pytest.mark.parametrize("number", [5, 6])
@pytest.mark.parametrize("must_match", [True, False])
@pytest.mark.parametrize("given", [{"section.inner.auto": 1}, {}])
def test_a_configuration_is_processed_as_by_the_real_one(
    number: int, must_match: bool, given: dict[str, Any]
) -> None:
    values = {
        "train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "bf16.enabled": True,
        **given,
        "section.inner.number": number,
    }
    found: list[Any] = []
    for kind in (Ours, Theirs):
        plugin: Any = kind(hf_ds_config=deepcopy(CONFIG))
        try:
            plugin.deepspeed_config_process(must_match=must_match, **values)
            found.append(plugin.deepspeed_config)
        except ValueError as error:
            found.append(type(error))
    assert found[0] == found[1]


HALVES: list[dict[str, Any]] = [
    {},
    {"fp16": {"enabled": True}},
    {"bf16": {"enabled": True}},
    {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}},
    {"fp16": {"enabled": "auto", "loss_scale": 0}},
    {"bf16": {"enabled": False}},
    {"fp16": {}},
]


@pytest.mark.parametrize("mode", ["fp16", "bf16", "fp8", "no"])
@pytest.mark.parametrize("halves", HALVES)
def test_the_precision_is_written_as_by_the_real_one(mode: str, halves: dict[str, Any]) -> None:
    found: list[Any] = []
    for kind in (Ours, Theirs):
        plugin: Any = kind(hf_ds_config={"zero_optimization": {"stage": 2}, **deepcopy(halves)})
        try:
            plugin.set_mixed_precision(mode)
            found.append(plugin.deepspeed_config)
        except ValueError:
            found.append("refused")
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "fields", [{}, {"zero_stage": 3}, {"zero_stage": 3, "gradient_accumulation_steps": 4}]
)
def test_transformers_is_told_the_configuration(fields: dict[str, Any]) -> None:
    integration = pytest.importorskip("transformers.integrations.deepspeed")
    found: list[Any] = []
    for kind in (Ours, Theirs):
        plugin: Any = kind(**fields)
        plugin.set_mixed_precision("bf16")
        plugin.set_deepspeed_weakref()
        found.append((plugin.dschf.config, integration.is_deepspeed_zero3_enabled()))
        integration.unset_hf_deepspeed_config()
    assert found[0] == found[1]


def test_partitioning_is_turned_off_for_a_block() -> None:
    for kind in (Ours, Theirs):
        plugin: Any = kind(zero_stage=3)
        assert plugin.is_zero3_init_enabled()
        with plugin.zero3_init_context_manager(enable=False):
            assert not plugin.is_zero3_init_enabled()
        assert plugin.is_zero3_init_enabled()


def test_a_plugin_is_chosen_by_the_state_alone() -> None:
    plugin = Ours()
    assert not plugin.selected
    with pytest.raises(ValueError, match="select_deepspeed_plugin"):
        plugin.select()
    with pytest.raises(NotImplementedError, match="select_deepspeed_plugin"):
        plugin.selected = True
    plugin.select(_from_accelerator_state=True)
    assert plugin.selected


def test_layers_with_experts_are_told_to_deepspeed() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    Ours(transformer_moe_cls_names="Linear").set_moe_leaf_modules(model)
    assert model[0]._z3_leaf
    with pytest.raises(ValueError, match="no module of the class 'Other'"):
        Ours(transformer_moe_cls_names="Other").set_moe_leaf_modules(model)
    Ours().set_moe_leaf_modules(model)
