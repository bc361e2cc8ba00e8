from pathlib import Path
from typing import Any

import pytest

from drivetrain_config import ConfigError
from drivetrain_config.files import read_file

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


def read(folder: Path, text: str, name: str = "default_config.yaml") -> dict[str, Any]:
    path = folder / name
    path.write_text(text)
    return dict(read_file(path).data)


def test_a_file_of_two_nodes_is_read_into_our_sections(tmp_path: Path) -> None:
    assert read(tmp_path, TWO_NODES) == {
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
    }


def test_each_value_keeps_its_line(tmp_path: Path) -> None:
    path = tmp_path / "default_config.yaml"
    path.write_text(TWO_NODES)
    contents = read_file(path)
    assert contents.where("launch", "num_processes") == f"{path}:13"
    assert contents.where("run", "backend") == f"{path}:3"


@pytest.mark.parametrize("kind", ["'NO'", "NO"])  # a bare NO is false to YAML
def test_no_distribution_leaves_the_backend_to_the_number_of_processes(tmp_path: Path, kind: str) -> None:
    found = read(tmp_path, f"distributed_type: {kind}\nnum_processes: 1\nmixed_precision: no\ngpu_ids: all\n")
    assert found == {"launch": {"num_processes": 1}, "run": {"mixed_precision": False}}


def test_training_on_many_cpus_is_training_on_the_cpu(tmp_path: Path) -> None:
    found = read(tmp_path, "distributed_type: MULTI_CPU\nuse_cpu: false\nnum_processes: 2\n")
    assert found["run"] == {"backend": "ddp", "cpu": True}


def test_a_single_device_and_empty_keys_are_read(tmp_path: Path) -> None:
    found = read(
        tmp_path, "distributed_type: MULTI_GPU\ngpu_ids: 3\nmain_process_ip: null\nfsdp_config: {}\n"
    )
    assert found == {"run": {"backend": "ddp"}, "launch": {"devices": "3"}}


def test_the_same_file_as_json_is_read(tmp_path: Path) -> None:
    found = read(tmp_path, '{"distributed_type": "NO", "num_processes": 2, "downcast_bf16": false}', "a.json")
    assert found == {"launch": {"num_processes": 2}}


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
            "distributed_type: DEEPSPEED",
            r"default_config\.yaml:2 distributed_type: DEEPSPEED \(here: NO, MULTI_CPU",
        ),
        ("dynamo_config: {dynamo_backend: INDUCTOR}", "yaml:2 dynamo_config: "),
        ("downcast_bf16: 'yes'", "yaml:2 downcast_bf16: yes"),
        ("enable_cpu_affinity: true", "yaml:2 enable_cpu_affinity: True"),
        ("fsdp_config: {fsdp_version: 2}", "yaml:2 fsdp_config: "),
        ("tpu_env: [A=1]", "yaml:2 tpu_env: "),
        ("num_procesess: 2", r"yaml:2 num_procesess: 2 \(an unknown key, did you mean 'num_processes'\?\)"),
        ("colour: red", r"yaml:2 colour: red \(an unknown key\)"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, f"compute_environment: LOCAL_MACHINE\n{line}\n")


def test_everything_that_cannot_be_honoured_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"compute_environment: AMAZON_SAGEMAKER; .*profile: me .*lines out"
    ):
        read(tmp_path, "compute_environment: AMAZON_SAGEMAKER\nprofile: me\nuse_cpu: true\n")


def test_a_section_of_that_name_is_no_mark_of_accelerate(tmp_path: Path) -> None:
    assert read(tmp_path, "distributed_type: {a: 1}\n") == {"distributed_type": {"a": 1}}
