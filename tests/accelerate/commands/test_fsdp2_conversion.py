"""FSDP1's keys converted to FSDP2's, against the real one."""

from argparse import Namespace
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

from drivetrain_accelerate.commands import fsdp2_conversion as ours

pytest.importorskip("accelerate", reason="the interface is held against the real one")

from accelerate.commands import to_fsdp2 as real

FAMILIES: list[dict[str, Any]] = [
    {},
    {"fsdp_version": 2, "fsdp_sharding_strategy": "FULL_SHARD"},
    {"fsdp_version": 1, "fsdp_sharding_strategy": "SHARD_GRAD_OP", "fsdp_backward_prefetch": "BACKWARD_PRE"},
    {"fsdp_use_orig_params": True, "fsdp_forward_prefetch": True, "fsdp_offload_params": True, "mine": 1},
    {"fsdp_reshard_after_forward": "HYBRID_SHARD", "fsdp_state_dict_type": "LOCAL_STATE_DICT"},
    {"fsdp_reshard_after_forward": True, "fsdp_min_num_params": 10},
    {"fsdp_sharding_strategy": 1, "fsdp_auto_wrap_policy": "NO_WRAP"},
    {"fsdp_sharding_strategy": "NOPE", "fsdp_sync_module_states": True},
]


@pytest.mark.parametrize("family", FAMILIES)
def test_contents_are_converted_as_by_the_real_one(family: dict[str, Any]) -> None:
    config = {"distributed_type": "FSDP", "num_processes": 2, "fsdp_config": family}
    assert ours.convert_config_to_fsdp2(deepcopy(config)) == real.convert_config_to_fsdp2(deepcopy(config))


def test_contents_without_fsdp_stay() -> None:
    assert ours.convert_config_to_fsdp2({"distributed_type": "NO"}) == {"distributed_type": "NO"}


def test_files_are_written_as_by_the_real_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "one.yaml"
    source.write_text(yaml.safe_dump({"distributed_type": "FSDP", "fsdp_config": FAMILIES[2]}))
    texts: list[str] = []
    for room, name in ((ours, "ours"), (real, "real")):
        target = tmp_path / f"{name}.yaml"
        args = Namespace(config_file=str(source), output_file=str(target), overwrite=False)
        room.to_fsdp2_command(args)
        texts.append(target.read_text())
        with pytest.raises(FileExistsError, match="already exists and --overwrite is not set"):
            room.to_fsdp2_command(args)
        with pytest.raises(ValueError, match="--output_file must be provided"):
            room.to_fsdp2_command(Namespace(config_file=str(source), output_file=None, overwrite=False))
    assert texts[0] == texts[1]
    assert "fsdp_backward_prefetch has been removed in FSDP2" in capsys.readouterr().out


def test_a_file_replaces_itself_only_if_told(tmp_path: Path) -> None:
    source = tmp_path / "one.yaml"
    source.write_text(yaml.safe_dump({"fsdp_config": {"fsdp_sharding_strategy": "FULL_SHARD"}}))
    args = ours.to_fsdp2_command_parser().parse_args(["--config-file", str(source), "--overwrite"])
    ours.to_fsdp2_command(args)
    assert ours.load_config(str(source)) == {
        "fsdp_config": {"fsdp_reshard_after_forward": True, "fsdp_version": 2}
    }
    with pytest.raises(FileNotFoundError, match=r"Config file none.yaml not found"):
        ours.to_fsdp2_command(Namespace(config_file="none.yaml", output_file="x.yaml", overwrite=False))
