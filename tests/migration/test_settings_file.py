from pathlib import Path
from typing import Any

import pytest

from drivetrain_config import ConfigError
from drivetrain_config.files.settings_file import read_file
from drivetrain_launcher import Host

TWO_NODES = """\
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: MULTI_GPU
downcast_bf16: 'no'
enable_cpu_affinity: false
gpu_ids: 0,1,2,3
machine_rank: 1
main_process_ip: 10.0.0.1
main_process_port: 29501
main_training_function: main
mixed_precision: bf16
num_machines: 2
num_processes: 8
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""
SHARDED = """\
distributed_type: FSDP
fsdp_config:
  fsdp_activation_checkpointing: false
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_cpu_ram_efficient_loading: true
  fsdp_offload_params: false
  fsdp_reshard_after_forward: false
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer
  fsdp_version: 2
mixed_precision: bf16
"""
PARTITIONED = """\
deepspeed_config:
  deepspeed_multinode_launcher: standard
  gradient_accumulation_steps: 16
  gradient_clipping: 1.0
  offload_optimizer_device: cpu
  offload_param_device: none
  zero3_init_flag: true
  zero3_save_16bit_model: true
  zero_stage: 3
distributed_type: DEEPSPEED
fsdp_config: {}
"""
FILES: dict[str, tuple[str, dict[str, Any]]] = {
    "two nodes": (
        TWO_NODES,
        {
            "launch": {
                "devices": "0,1,2,3",
                "node_rank": 1,
                "master_addr": "10.0.0.1",
                "master_port": 29501,
                "num_nodes": 2,
                "num_processes": 8,
                "rdzv_backend": "static",
            },
            "run": {"backend": "ddp", "mixed_precision": "bf16", "cpu": False},
            "state": {"debug": False},
        },
    ),
    "sharded": (
        SHARDED,
        {
            "fsdp": {
                "offload": False,
                "strategy": "shard_grad_op",
                "wrap": "LlamaDecoderLayer",
            },
            "model": {"activation_checkpointing": "none"},
            "run": {"backend": "fsdp", "mixed_precision": "bf16"},
        },
    ),
    "partitioned": (
        PARTITIONED,
        {
            "deepspeed": {
                "config": {"gradient_clipping": 1.0},
                "offload_optimizer": "cpu",
                "offload_param": "none",
                "stage": 3,
            },
            "run": {"gradient_accumulation_steps": 16, "backend": "deepspeed"},
        },
    ),
    "no distribution, by the number of processes": (
        "distributed_type: 'NO'\nnum_processes: 1\nmixed_precision: no\ngpu_ids: all\n",
        {"launch": {"num_processes": 1}, "run": {"mixed_precision": False}},
    ),
    "a bare NO, false to YAML": (
        "distributed_type: NO\nnum_processes: 1\n",
        {"launch": {"num_processes": 1}},
    ),
    "many CPUs": (
        "distributed_type: MULTI_CPU\nuse_cpu: false\n",
        {"run": {"backend": "ddp", "cpu": True}},
    ),
    "a single device, empty keys": (
        "distributed_type: MULTI_GPU\ngpu_ids: 3\nmain_process_ip: null\nfsdp_config: {}\n",
        {"run": {"backend": "ddp"}, "launch": {"devices": "3"}},
    ),
    "affinity": ("distributed_type: 'NO'\nenable_cpu_affinity: true\n", {"launch": {"bind": "auto"}}),
    "an option that is false": (
        "distributed_type: FSDP\nfsdp_config: {fsdp_reshard_after_forward: false}\n",
        {"fsdp": {"strategy": "shard_grad_op"}, "run": {"backend": "fsdp"}},
    ),
    "a section of that name is no mark of Accelerate": (
        "distributed_type: {a: 1}\n",
        {"distributed_type": {"a": 1}},
    ),
}


def read(folder: Path, text: str, name: str = "default_config.yaml") -> dict[str, Any]:
    path = folder / name
    path.write_text(text)
    return dict(read_file(path).data)


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_read_into_our_sections(tmp_path: Path, name: str) -> None:
    text, sections = FILES[name]
    assert read(tmp_path, text) == sections


def test_the_same_file_as_json_is_read(tmp_path: Path) -> None:
    found = read(tmp_path, '{"distributed_type": "NO", "num_processes": 2, "downcast_bf16": false}', "a.json")
    assert found == {"launch": {"num_processes": 2}}


@pytest.mark.parametrize(
    ("text", "key", "line"),
    [
        (TWO_NODES, ("launch", "num_processes"), 13),
        (TWO_NODES, ("run", "backend"), 3),
        (SHARDED, ("fsdp", "strategy"), 7),
    ],
)
def test_each_value_keeps_its_line(tmp_path: Path, text: str, key: tuple[str, str], line: int) -> None:
    path = tmp_path / "default_config.yaml"
    path.write_text(text)
    assert read_file(path).where(*key) == f"{path}:{line}"


def test_a_file_for_megatron_lm_becomes_sizes_of_the_mesh(tmp_path: Path) -> None:
    megatron = (
        "megatron_lm_tp_degree: 2, megatron_lm_pp_degree: 2, megatron_lm_num_micro_batches: 4, "
        "megatron_lm_gradient_clipping: 1.0, megatron_lm_sequence_parallelism: true"
    )
    text = f"distributed_type: MEGATRON_LM\nmegatron_lm_config: {{{megatron}}}\n"
    assert read(tmp_path, text) == {
        "run": {"backend": "megatron"},
        "parallel": {"tensor": 2, "pipeline": 2, "pipeline_micro_batches": 4},
    }
    alone = text.replace("pp_degree: 2", "pp_degree: 1")
    assert read(tmp_path, alone) == {
        "run": {"backend": "megatron", "gradient_accumulation_steps": 4},
        "parallel": {"tensor": 2, "pipeline": 1},
    }


@pytest.mark.parametrize(
    "extra",
    [
        "dynamo_config: {dynamo_backend: 'NO', dynamo_mode: default}",
        "dynamo_backend: 'NO'",
        "ipex_config: {ipex: false, use_xpu: false}",
        "deepspeed_config: {}\nmegatron_lm_config: null",
        "commands: null\ntpu_name: null",
        "same_network: false",
    ],
)
def test_what_is_switched_off_asks_for_nothing(tmp_path: Path, extra: str) -> None:
    assert read(tmp_path, f"distributed_type: NO\n{extra}\n") == {}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "distributed_type: XLA",
            r"default_config\.yaml:2 distributed_type: XLA \(here: NO, MULTI_CPU",
        ),
        ("dynamo_config: {dynamo_backend: INDUCTOR}", "yaml:2 dynamo_config: "),
        ("downcast_bf16: 'yes'", "yaml:2 downcast_bf16: yes"),
        ("enable_cpu_affinity: near", r"yaml:2 enable_cpu_affinity: near \(true or false\)"),
        (
            "fsdp_config: {fsdp_version: 2}",
            r"yaml:2 fsdp_config: .* \(a mapping beside distributed_type: FSDP\)",
        ),
        (
            "distributed_type: FSDP\nfsdp_config: shards",
            r"yaml:3 fsdp_config: shards \(a mapping beside distributed_type: FSDP\)",
        ),
        (
            "distributed_type: FSDP\nfsdp_config:\n  fsdp_backward_prefetch: BACKWARD_POST",
            r"yaml:4 fsdp_config\.fsdp_backward_prefetch: BACKWARD_POST \(FSDP2 .* --fsdp-prefetch N\)",
        ),
        (
            "distributed_type: FSDP\nfsdp_config: {fsdp_sharding_stategy: 1}",
            r"yaml:3 fsdp_config\.fsdp_sharding_stategy: 1 \(an unknown key; did you mean fsdp_sharding_str",
        ),
        (
            "distributed_type: DEEPSPEED\ngradient_accumulation_steps: 2\n"
            "deepspeed_config: {gradient_accumulation_steps: 4}",
            r"yaml:4 .*steps: 4 \(another key has run\.gradient_accumulation_steps=2\)",
        ),
        ("tpu_env: [A=1]", "yaml:2 tpu_env: "),
        ("num_procesess: 2", r"yaml:2 num_procesess: 2 \(an unknown key; did you mean num_processes\)"),
        ("colour: red", r"yaml:2 colour: red \(an unknown key\)"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, f"compute_environment: LOCAL_MACHINE\n{line}\n")


TORCHAO = "{backend: AO, enable_fsdp_float8_all_gather: true, pad_inner_dim: true}"
ENGINE = (
    "{amax_compute_algorithm: max, amax_history_length: 1024, backend: TE, fp8_format: HYBRID, interval: 1, "
    "margin: 0, override_linear_precision: [false, false, false], use_autocast_during_eval: false}"
)


@pytest.mark.parametrize(
    ("options", "recipe"),
    [(TORCHAO, "torchao_tensorwise"), (ENGINE, "te_delayed"), ("{fp8_backend: TE}", "te_delayed")],
)
@pytest.mark.parametrize("kind", ["NO", "MULTI_GPU", "FSDP"])
def test_what_accelerate_config_writes_of_fp8_names_a_recipe(
    tmp_path: Path, options: str, recipe: str, kind: str
) -> None:
    found = read(tmp_path, f"distributed_type: {kind}\nmixed_precision: fp8\nfp8_config: {options}\n")
    assert found["precision"] == {"fp8_recipe": recipe}
    assert found["run"]["mixed_precision"] == "fp8"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("{backend: MSAMP}", r"yaml:2 fp8_config\.backend: MSAMP \(MS-AMP is not here"),
        ("{optimization_level: O1}", "MS-AMP is not here"),
        ("{fp8_format: E4M3}", r"TransformerEngineRecipe\(.*'fp8_format': 'e4m3'"),
        ("{amax_history_length: 16}", "'amax_history_len': 16"),
        ("{amax_compute_algorithm: most_recent}", "'amax_compute_algo': 'most_recent'"),
        ("{margin: 2}", "'margin': 2"),
        ("{interval: 2}", "computed in every step"),
        ("{override_linear_precision: [false, false, true]}", "torchao_rowwise_with_gw_hp"),
        ("{override_linear_precision: [true, false, true]}", "--precision-fp8-exclude"),
        ("{use_mxfp8_block_scaling: true}", "te_mxfp8"),
        ("{backnd: AO}", r"an unknown key; did you mean backend"),
        ("narrow", r"fp8_config: narrow \(a mapping\)"),
    ],
)
def test_an_option_of_fp8_without_a_setting_is_refused_with_what_to_say(
    tmp_path: Path, options: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, f"distributed_type: MULTI_GPU\nfp8_config: {options}\n")


def test_everything_that_cannot_be_honoured_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"compute_environment: AMAZON_SAGEMAKER; .*profile: me .*lines out"
    ):
        read(tmp_path, "compute_environment: AMAZON_SAGEMAKER\nprofile: me\nuse_cpu: true\n")


@pytest.mark.parametrize(
    ("host", "notices"),
    [
        (Host(accelerator="cuda"), ()),
        (Host(), ("a.yaml:2 distributed_type: MULTI_GPU, but this host has no GPU",)),
    ],
)
def test_gpus_that_the_host_does_not_have_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: Host, notices: tuple[str, ...]
) -> None:
    monkeypatch.setattr("drivetrain_migration.settings_file.detect_host", lambda _device: host)
    (tmp_path / "a.yaml").write_text("use_cpu: false\ndistributed_type: MULTI_GPU\n")
    assert read_file(tmp_path / "a.yaml").notices == notices
