"""The configuration of an engine: a pure function of settings and run."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drivetrain_deepspeed import DeepSpeedSettings, EngineConfigError
from drivetrain_deepspeed.checks import check_dtypes
from drivetrain_deepspeed.config import EngineRun, engine_config, flatten, nest
from drivetrain_precision import PrecisionError, PrecisionSettings, choose_policy

RUN = EngineRun(
    world_size=4,
    gradient_accumulation_steps=2,
    micro_batch_size=8,
    mode="bf16",
    num_elements=1000,
    optimizer="AdamW",
    optimizer_options={"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.01},
)


def config(
    given: dict[str, Any] | Path | None = None, run: EngineRun = RUN, **settings: Any
) -> dict[str, Any]:
    return engine_config(DeepSpeedSettings(config=given, **settings), run)


def test_batches_and_precision_are_the_runs() -> None:
    made = config()
    assert made["train_batch_size"] == 64
    assert made["bf16"]["enabled"]
    assert not made["fp16"]["enabled"]
    assert made["zero_optimization"]["stage"] == 2


def test_buffers_are_no_larger_than_the_model() -> None:
    assert config()["zero_optimization"]["reduce_bucket_size"] == 1000
    assert config(run=EngineRun(world_size=1))["zero_optimization"]["reduce_bucket_size"] == 500_000_000


def test_offload_is_written_where_it_is_asked_for() -> None:
    zero = config(stage=3, offload_optimizer="cpu", offload_param="nvme", nvme_path=Path("/disk"))[
        "zero_optimization"
    ]
    assert zero["offload_optimizer"] == {"device": "cpu"}
    assert zero["offload_param"] == {"device": "nvme", "nvme_path": "/disk"}


def test_a_given_configuration_replaces_defaults_and_keeps_what_it_has_besides() -> None:
    made = config(
        {
            "gradient_clipping": 0.5,
            "zero_optimization": {"stage": 3, "sub_group_size": 7},
            "aio": {"block_size": 9},
        }
    )
    assert made["gradient_clipping"] == 0.5
    assert made["zero_optimization"]["stage"] == 3
    assert made["zero_optimization"]["sub_group_size"] == 7
    assert made["aio"] == {"block_size": 9}


def test_auto_is_filled_in() -> None:
    names = (
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
    )
    given = dict.fromkeys(names, "auto") | {
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": "auto", "reduce_bucket_size": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "weight_decay": 0.01}},
    }
    made = config(given)
    assert made == config() | {
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "betas": [0.9, 0.99], "weight_decay": 0.01}}
    }


def test_a_json_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 1}}))
    assert config(file)["zero_optimization"]["stage"] == 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"gradient_accumulation_steps": 4},
            r"gradient_accumulation_steps=4 contradicts gradient_accumulation_steps=2",
        ),
        ({"fp16": {"enabled": True}}, r"fp16.enabled=True contradicts mixed_precision='bf16'"),
        ({"bf16": {"enabled": False}}, r"bf16.enabled=False contradicts mixed_precision='bf16'"),
        ({"train_micro_batch_size_per_gpu": 3}, r"=3 contradicts the prepared loaders' batch_size=8"),
        ({"train_batch_size": 63}, r"train_batch_size=63 contradicts .*batch_size=8, .*=2 and 4 processes"),
        ({"managed_gradient_accumulation": False}, "contradicts the accumulation window"),
        ({"gradient_allreduce_op": "sum"}, "contradicts the mean over ranks"),
        ({"torch_autocast": {"enabled": True}}, "contradicts mixed_precision='bf16', which says what models"),
        ({"optimizer": {"type": "Adam"}}, "optimizer.type='Adam' contradicts the prepared optimizer, AdamW"),
        (
            {"optimizer": {"type": "AdamW", "params": {"lr": 0.2}}},
            "lr=0.2 contradicts lr=0.1 of the prepared AdamW",
        ),
    ],
)
def test_contradictions_name_both_values(given: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineConfigError, match=message):
        config(given)


def test_a_setting_and_a_given_configuration_contradict_each_other() -> None:
    with pytest.raises(EngineConfigError, match=r"zero_optimization.stage=2 contradicts deepspeed.stage=3"):
        config({"zero_optimization": {"stage": 2}}, stage=3)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"gradient_cliping": 1.0},
            r"gradient_cliping is nothing that DeepSpeed reads; did you mean gradient_clipping",
        ),
        ({"zero_optimization": {"stagge": 2}}, r"did you mean zero_optimization.stage"),
        (
            {"zero_optimization": {"offload_param": {"dev": "cpu"}}},
            r"did you mean zero_optimization.offload_param.device",
        ),
        ({"zero_optimization": True}, "must be an object with a stage"),
        ({"bf16": {"on": True}}, "bf16.on is nothing"),
        ({"zero_optimization": {"stage": 4}}, "must be 0, 1, 2 or 3"),
        ({"steps_per_print": "auto"}, "nothing in the run says what it should be"),
        ({"scheduler": {"type": "WarmupLR"}}, "pass it to prepare"),
        ({"pipeline": {"stages": 2}}, "a section pipeline: DeepSpeed reads it for its PipelineModule alone"),
        ({"tensor_parallel": {"autotp_size": 2}}, "a section tensor_parallel"),
        ({"gradient_clipping": "1.0"}, r"gradient_clipping='1.0': must be a norm"),
        ({"gradient_clipping": -1.0}, r"gradient_clipping=-1.0: must be a norm"),
        (
            {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}},
            "offload_param to cpu in stage 2: it takes stage 3",
        ),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme"}}},
            "offload_optimizer to nvme in stage 2: it takes stage 3",
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}},
            "offload_optimizer to nvme without a folder: say nvme_path",
        ),
    ],
)
def test_what_deepspeed_would_drop_or_do_wrong_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineConfigError, match=message):
        config(given)


def test_an_offload_that_the_default_stage_has_not_is_refused() -> None:
    with pytest.raises(EngineConfigError, match="offload_param to cpu in stage 2: it takes stage 3"):
        config(offload_param="cpu")


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, (1, 8)),
        ({"train_batch_size": 64}, (8, 64)),
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": "auto"}, (8, 64)),
        ({"train_micro_batch_size_per_gpu": 3}, (3, 24)),
        ({"train_micro_batch_size_per_gpu": 3, "train_batch_size": 24}, (3, 24)),
    ],
)
def test_one_batch_size_follows_from_the_other(given: dict[str, Any], found: tuple[int, int]) -> None:
    made = config(given, run=EngineRun(world_size=4, gradient_accumulation_steps=2))
    assert (made["train_micro_batch_size_per_gpu"], made["train_batch_size"]) == found


@pytest.mark.parametrize(
    "given", [{"train_batch_size": 63}, {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 3}]
)
def test_batch_sizes_that_do_not_multiply_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(EngineConfigError, match=r"train_batch_size=\d+ is not .* x 4 processes; make them"):
        config(given, run=EngineRun(world_size=4, gradient_accumulation_steps=2))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_auto_may_stand_for_what_another_stage_has(stage: int) -> None:
    names = ("allgather_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
    made = config(
        {"zero_optimization": {"stage": stage, **dict.fromkeys(names, "auto")}}, run=EngineRun(world_size=1)
    )
    assert "auto" not in made["zero_optimization"].values()


def test_stage_0_in_half_precision_is_refused() -> None:
    with pytest.raises(EngineConfigError, match=r"stage=0 .*adds gradients up in bf16"):
        config(stage=0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is no JSON"),
        ("[]", "must hold an object, not a list"),
        ('{"a": 1, "a": 2}', r"\['a'\] stand there twice"),
        ('{"a":' * 102 + "1" + "}" * 102, "is nested too deeply"),
        ('{"a":' * 50_000 + "1" + "}" * 50_000, "is nested too deeply"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "ds.json"
    file.write_text(text)
    with pytest.raises(EngineConfigError, match=f"ds.json.*{message}"):
        config(file)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "ds.json")
    with pytest.raises(EngineConfigError, match=r"ds.json.*cannot be read \(is no regular file, but a pipe"):
        config(tmp_path / "ds.json")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineConfigError, match=r"none.json.*cannot be read \(No such file"):
        config(tmp_path / "none.json")


values = st.none() | st.booleans() | st.integers() | st.text(max_size=3)
keys = st.text("abc", min_size=1, max_size=3)


@given(
    st.dictionaries(
        keys,
        st.recursive(
            values, lambda inner: st.dictionaries(keys, inner, min_size=1, max_size=3), max_leaves=6
        ),
    )
)
def test_nesting_undoes_flattening(nested: dict[str, Any]) -> None:
    assert nest(flatten(nested)) == nested


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"offload_param": "cpu", "stage": 2}, "^offload_param='cpu': .* stage 3 alone, not 2"),
        ({"offload_optimizer": "cpu", "stage": 0}, "^offload_optimizer='cpu': stage 0"),
        ({"offload_optimizer": "nvme", "stage": 3}, "^nvme_path=None"),
        ({"offload_optimizer": "nvme", "stage": 2, "nvme_path": Path("/x")}, "needs stage 3, not 2"),
        ({"reduce_bucket_size": 0}, "^reduce_bucket_size=0: must be at least 1 element"),
        ({"allgather_bucket_size": 7}, "^allgather_bucket_size=7: .* even"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DeepSpeedSettings(**settings)


FP16 = EngineRun(world_size=1, mode="fp16", scaling=PrecisionSettings())


def test_the_engines_own_loss_scale_stands_still() -> None:
    assert config(run=FP16)["fp16"] == {
        "enabled": True,
        "fp16_master_weights_and_grads": False,
        "loss_scale": 1.0,
    }


def test_a_given_loss_scale_must_be_the_runs() -> None:
    same = {"loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 2000, "hysteresis": "auto"}
    assert config({"fp16": same}, run=FP16) == config(run=FP16)
    with pytest.raises(
        EngineConfigError, match=r"fp16.loss_scale_window=1000 contradicts precision.growth_interval=2000"
    ):
        config({"fp16": same | {"loss_scale_window": 1000}}, run=FP16)
    assert config({"fp16": same | {"min_loss_scale": 1}}, run=FP16) == config(run=FP16)
    with pytest.raises(EngineConfigError, match=r"fp16.min_loss_scale=2 contradicts precision.min_scale=1.0"):
        config({"fp16": same | {"min_loss_scale": 2}}, run=FP16)
    with pytest.raises(EngineConfigError, match=r"fp16.hysteresis=2 contradicts a loss scale that falls"):
        config({"fp16": same | {"hysteresis": 2}}, run=FP16)


def test_the_reduction_of_the_run_is_the_engines() -> None:
    run = replace(RUN, reduce="bf16")
    assert config(run=run)["communication_data_type"] == "bf16"
    assert config(run=run, communication_data_type="bf16")["communication_data_type"] == "bf16"


def test_two_reductions_are_refused_with_both_names() -> None:
    run = replace(RUN, reduce="bf16")
    message = "communication_data_type='fp32' with precision.reduce_dtype='bf16'"
    with pytest.raises(EngineConfigError, match=f"deepspeed.{message}"):
        config(run=run, communication_data_type="fp32")
    with pytest.raises(EngineConfigError, match=r"contradicts precision\.reduce_dtype='bf16'"):
        config({"communication_data_type": "fp32"}, run)


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ({"param_dtype": "bf16"}, "precision.param_dtype='bf16' with backend='deepspeed'"),
        ({"keep_fp32": ("*.norm",), "buffer_dtype": "bf16"}, "buffer_dtype='bf16', precision.keep_fp32="),
    ],
)
def test_dtypes_that_an_engine_does_not_apply_are_refused(said: dict[str, Any], shown: str) -> None:
    policy = choose_policy("bf16", torch.device("cpu"), PrecisionSettings(**said))
    with pytest.raises(PrecisionError, match=f"{shown}.*It takes reduce_dtype and output_dtype"):
        check_dtypes(policy)
