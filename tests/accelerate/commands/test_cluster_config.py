"""Accelerate's configuration files, against the real one."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from drivetrain_accelerate.commands import cluster_config as ours
from drivetrain_accelerate.errors import NotProvidedError

pytest.importorskip("accelerate", reason="the interface is held against the real one")

from accelerate.commands.config import config_args as real

LOCAL: dict[str, Any] = {"compute_environment": "LOCAL_MACHINE"}
FILES: list[dict[str, Any]] = [
    {**LOCAL, "distributed_type": "NO", "num_processes": 1, "mixed_precision": "bf16", "use_cpu": True},
    {**LOCAL, "distributed_type": "NO", "fp16": True},
    {**LOCAL, "distributed_type": "MULTI_GPU", "num_processes": 4, "gpu_ids": "0,1,2,3", "debug": True},
    {**LOCAL, "distributed_type": "MULTI_GPU", "dynamo_backend": "INDUCTOR"},
    {**LOCAL, "distributed_type": "MULTI_CPU", "dynamo_backend": "NO", "mpirun_config": {"mpirun_ccl": "1"}},
    {**LOCAL, "distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}, "num_machines": 2},
    {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 3}, "main_process_port": 1234},
    {**LOCAL, "distributed_type": "NO", "dynamo_config": {"dynamo_backend": "EAGER"}, "commands": ["ls"]},
]
WRONG: list[Any] = [
    {},
    None,
    {"mixed_precision": "fp16"},
    {**LOCAL, "distributed_type": "BAD"},
    {"compute_environment": "MOON", "distributed_type": "NO"},
    {**LOCAL, "distributed_type": "NO", "nothing": 1},
]


def write(folder: Path, contents: Any, ending: str) -> Path:
    path = folder / f"config.{ending}"
    path.write_text(json.dumps(contents) if ending == "json" else yaml.safe_dump(contents))
    return path


@pytest.mark.parametrize("ending", ["yaml", "json"])
@pytest.mark.parametrize("contents", FILES)
def test_a_file_is_read_and_written_as_the_real_one_does(
    tmp_path: Path, contents: dict[str, Any], ending: str
) -> None:
    path = write(tmp_path, contents, ending)
    mine, theirs = ours.load_config_from_file(str(path)), real.load_config_from_file(str(path))
    assert repr(mine) == repr(theirs)
    assert mine.to_dict() == theirs.to_dict()
    for form in ("yaml", "json"):
        getattr(mine, f"to_{form}_file")(tmp_path / "mine")
        getattr(theirs, f"to_{form}_file")(tmp_path / "theirs")
        assert (tmp_path / "mine").read_text() == (tmp_path / "theirs").read_text()
        again = getattr(ours.ClusterConfig, f"from_{form}_file")(tmp_path / "mine")
        assert again == mine


@pytest.mark.parametrize("contents", WRONG)
def test_a_file_that_is_wrong_is_an_error_with_both(tmp_path: Path, contents: Any) -> None:
    path = write(tmp_path, contents, "yaml")
    errors = (ValueError, AttributeError)  # theirs cannot say what an empty file lacks
    with pytest.raises(errors):
        real.load_config_from_file(str(path))
    with pytest.raises(ValueError, match=r"distributed_type|DistributedType|ComputeEnvironment|unknown keys"):
        ours.load_config_from_file(str(path))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"The passed configuration file .*none.yaml"):
        ours.load_config_from_file(tmp_path / "none.yaml")


def test_a_file_for_sagemaker_says_that_there_is_no_launcher(tmp_path: Path) -> None:
    path = write(tmp_path, {"compute_environment": "AMAZON_SAGEMAKER", "distributed_type": "NO"}, "yaml")
    with pytest.raises(NotProvidedError, match="is for SageMaker, for which there is no launcher here"):
        ours.load_config_from_file(path)


def test_places_are_those_of_the_real_one() -> None:
    for name in (
        "hf_cache_home",
        "cache_dir",
        *(f"default_{form}config_file" for form in ("", "json_", "yaml_")),
    ):
        assert getattr(ours, name) == getattr(real, name)


def test_values_given_in_code_are_as_with_the_real_one() -> None:
    arguments = ("LOCAL_MACHINE", "MULTI_CPU", "no", False, False)
    mine: Any = ours.ClusterConfig
    assert repr(mine(*arguments)) == repr(real.ClusterConfig(*arguments))
    with pytest.raises(ValueError, match="'BAD' is not a valid DistributedType"):
        mine("LOCAL_MACHINE", "BAD", "no", False, False)


@pytest.mark.parametrize("name", ["a.json", "a.yaml"])
@pytest.mark.parametrize("kind", [ours.BaseConfig, ours.ClusterConfig])
@pytest.mark.slow
def test_a_pipe_and_levels_without_end_are_refused(name: str, kind: Any, tmp_path: Path) -> None:
    path = tmp_path / name
    reads = [
        kind.from_json_file if name.endswith("json") else kind.from_yaml_file,
        ours.load_config_from_file,
    ]
    for read in reads:
        path.write_text("[" * 50_000)
        with pytest.raises(ValueError, match=f"{name}: is nested too deeply"):
            read(path)
        path.unlink()
        os.mkfifo(path)
        with pytest.raises(OSError, match="is no regular file, but a pipe"):
            read(path)
        path.unlink()
