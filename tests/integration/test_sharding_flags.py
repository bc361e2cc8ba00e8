import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from drivetrain_config import Layers, resolve
from drivetrain_launcher.cli.commands.launch import LaunchArguments
from drivetrain_launcher.cli.flag_aliases import MEANINGS, RENAMED, refusal
from drivetrain_launcher.cli.foreign_flags import translator_of
from drivetrain_launcher.cli.parser import build_parser
from drivetrain_launcher.errors import UsageError
from drivetrain_migration.option_families import DEEPSPEED, FSDP


def said(*tokens: str) -> dict[str, Any]:
    """What flags say, brought to their fields' types; what was not said is left out."""
    from drivetrain_config import sections

    layers = build_parser("launch", LaunchArguments, "Run it.").parse([*tokens, "train.py"]).layers
    return {
        f"{section}.{name}": getattr(resolve(kind, section=section, layers=layers).value, name)
        for section, kind in sections().items()
        for name in layers.of_section(section)
    }


@pytest.mark.parametrize(
    ("tokens", "settings"),
    [
        ("--use_fsdp --fsdp_version 2", {"run.backend": "fsdp"}),
        ("--fsdp_sharding_strategy FULL_SHARD", {"fsdp.strategy": "full_shard"}),
        ("--fsdp-sharding-strategy=1", {"fsdp.strategy": "full_shard"}),
        ("--fsdp_reshard_after_forward false", {"fsdp.strategy": "shard_grad_op"}),
        ("--fsdp_offload_params false", {"fsdp.offload": False}),
        (
            "--fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP --fsdp_transformer_layer_cls_to_wrap Block,Head",
            {"fsdp.wrap": ("Block", "Head")},
        ),
        ("--fsdp_auto_wrap_policy NO_WRAP", {"fsdp.wrap": ()}),
        ("--fsdp_auto_wrap_policy SIZE_BASED_WRAP --fsdp_min_num_params 2000", {"fsdp.min_num_params": 2000}),
        ("--fsdp-min-num-params 2000", {"fsdp.min_num_params": 2000}),
        ("--model-activation-checkpointing selective", {"model.activation_checkpointing": "selective"}),
        ("--fsdp_backward_prefetch BACKWARD_PRE --fsdp_use_orig_params true", {}),
        ("--fsdp_state_dict_type SHARDED_STATE_DICT --fsdp_sync_module_states true", {}),
        ("--zero_stage 3", {"deepspeed.stage": 3}),
        (
            "--offload_optimizer_device cpu --offload_param_device none",
            {"deepspeed.offload_optimizer": "cpu", "deepspeed.offload_param": "none"},
        ),
        ("--gradient_clipping 0.5", {"deepspeed.config": {"gradient_clipping": 0.5}}),
        ("--zero3_init_flag false --deepspeed_multinode_launcher standard", {}),
        ("--deepspeed-stage 1 --zero_stage 1", {"deepspeed.stage": 1}),
    ],
)
def test_a_switch_means_what_it_means_there(
    tokens: str, settings: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert said(*tokens.split()) == settings
    assert capsys.readouterr().err == ""


def test_paths_are_passed_on() -> None:
    found = said("--offload_param_device", "nvme", "--offload_param_nvme_path", "/disk", "--zero_stage", "3")
    assert str(found["deepspeed.nvme_path"]) == "/disk"
    assert str(said("--deepspeed_config_file", "ds.json")["deepspeed.config"]) == "ds.json"


@pytest.mark.parametrize(
    ("tokens", "line"),
    [
        ("--fsdp_version 1", "--fsdp_version 1: FSDP2 is what runs; it trains the same"),
        (
            "--fsdp_cpu_ram_efficient_loading=true",
            "--fsdp_cpu_ram_efficient_loading true: say it in the script: build the model inside "
            "accelerator.building(), or with values on rank 0 and on meta elsewhere, and prepare hands them on",
        ),
        (
            "--zero_stage 3 --zero3_save_16bit_model true",
            "--zero3_save_16bit_model true: save_state writes whole weights in every stage, in fp32",
        ),
    ],
)
def test_what_is_met_in_another_way_is_told(
    tokens: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said(*tokens.split())
    assert capsys.readouterr().err == f"drivetrain: {line}\n"


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ("--fsdp_activation_checkpointing_offload true", "activations are not offloaded here"),
        ("--deepspeed_moe_layer_cls_names Moe", "no setting here says which layers hold experts"),
        ("--gradient_clipping 1 --deepspeed_config_file ds.json", "write gradient_clipping into ds.json"),
        ("--deepspeed-stage 2 --zero_stage 3", "--zero_stage 3: contradicts --deepspeed-stage 2; keep one"),
        (
            "--zero_stage 4 --fsdp_version 3",
            "--fsdp_version 3: say one of 2, 1; --zero_stage 4: say one of 0",
        ),
        ("--zero_stage", "--zero_stage: needs a value"),
        ("--backend ddp --use_fsdp", "--use_fsdp (--backend fsdp): contradicts --backend ddp"),
        (
            "--use_fsdp=false",
            "--use_fsdp=false: --use_fsdp takes no value; --use_fsdp alone means --backend fsdp",
        ),
        ("--fsdp_sharding_stategy 1", "--fsdp_sharding_stategy: no such flag; did you mean"),
    ],
)
def test_what_cannot_be_honoured_is_refused_with_the_way_out(tokens: str, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        build_parser("launch", LaunchArguments, "Run it.").parse(tokens.split())


def test_no_word_is_spelled_or_refused_elsewhere() -> None:
    flags = ["--" + word.replace("_", "-") for family in (FSDP, DEEPSPEED) for word in family.words]
    assert not [flag for flag in flags if flag in RENAMED or flag in MEANINGS or refusal(flag)]
    assert all(translator_of(flag, ()) for flag in flags)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    zero_stage: int = field(default=0, metadata={"help": "Its own."})


def test_a_commands_own_flag_is_its_own() -> None:
    assert build_parser("stages", Stages, "Its stages.").parse(["--zero-stage", "9"]) == Stages(zero_stage=9)


TOLD = """\
distributed_type: DEEPSPEED
deepspeed_config:
  zero_stage: 3
  zero3_init_flag: true
  zero3_save_16bit_model: true
"""


@pytest.mark.parametrize(("rank", "spoken"), [(None, True), ("0", True), ("1", False)])
def test_what_is_met_in_another_way_is_told_once(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    rank: str | None,
    spoken: bool,
) -> None:
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    path = tmp_path / "default_config.yaml"
    path.write_text(TOLD)
    Layers.read(file=path)
    lines = [
        "default_config.yaml:4 deepspeed_config.zero3_init_flag: True: say it in the script: inside "
        "accelerator.building() parameters are partitioned as they are made",
        "default_config.yaml:5 deepspeed_config.zero3_save_16bit_model: True: save_state writes whole weights in "
        "every stage, in fp32",
    ]
    assert [record.message for record in caplog.records] == (lines if spoken else [])
