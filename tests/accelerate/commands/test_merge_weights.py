"""Sharded weights merged into one export, against the real one."""

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from drivetrain_accelerate.commands.merge_weights import (
    MergeWeightsArguments,
    merge_command,
    merge_command_parser,
    run,
)
from drivetrain_launcher.errors import LaunchError

pytest.importorskip("accelerate", reason="the interface is held against the real one")

from accelerate.commands.merge import merge_command as real_merge

# What torch says of a save without other processes.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

WEIGHTS = {"a.weight": torch.arange(12.0).reshape(3, 4), "b": torch.ones(2, dtype=torch.bfloat16)}


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    folder = tmp_path / "pytorch_model_fsdp_0"
    dcp.save({"model": WEIGHTS}, checkpoint_id=folder, no_dist=True)
    return folder


def merge(folder: Path, output: Path, **more: bool) -> None:
    run(MergeWeightsArguments(checkpoint_directory=folder, output_path=output, **more))


@pytest.mark.parametrize("flags", [[], ["--unsafe_serialization"]])
def test_weights_of_fsdp_are_those_of_the_real_one(tmp_path: Path, sharded: Path, flags: list[str]) -> None:
    for name, command in (("ours", merge_command), ("real", real_merge)):
        command(merge_command_parser().parse_args([str(sharded), str(tmp_path / name), *flags]))
    (file,) = (path.name for path in (tmp_path / "real").iterdir())
    assert [path.name for path in (tmp_path / "ours").iterdir()] == [file]
    read = load_file if file.endswith(".safetensors") else torch.load
    mine, theirs = read(tmp_path / "ours" / file), read(tmp_path / "real" / file)
    assert mine.keys() == theirs.keys() == WEIGHTS.keys()
    for name, tensor in WEIGHTS.items():
        assert torch.equal(mine[name], tensor)
        assert torch.equal(theirs[name], tensor)


def test_the_sharded_weights_are_removed_if_told(tmp_path: Path, sharded: Path) -> None:
    merge(sharded, tmp_path / "out", remove_checkpoint_dir=True)
    assert not sharded.exists()
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_a_checkpoint_of_drivetrain_is_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from drivetrain import Accelerator

    accelerator = Accelerator(cpu=True, project_dir=tmp_path)
    model = accelerator.prepare(torch.nn.Linear(4, 2))
    accelerator.save_state(tmp_path / "state")
    (folder,) = (tmp_path / "state").glob("step-*")
    merge(tmp_path / "state", tmp_path / "out")
    assert capsys.readouterr().out == f"the weights of {folder} are in {tmp_path / 'out'}\n"
    merged = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(merged["weight"], model.weight)
    with pytest.raises(LaunchError, match="--unsafe_serialization: exports of drivetrain's checkpoints are"):
        merge(folder, tmp_path / "x", unsafe_serialization=True)


def test_a_folder_that_holds_no_weights_is_refused_with_what_to_name(tmp_path: Path, sharded: Path) -> None:
    with pytest.raises(LaunchError, match=f"holds no weights itself; name {sharded}"):
        merge(tmp_path, tmp_path / "out")
    with pytest.raises(LaunchError, match="there is no such folder"):
        merge(tmp_path / "none", tmp_path / "out")


def test_weights_beside_other_state_are_found_and_what_is_no_tensor_is_refused(tmp_path: Path) -> None:
    for name, state in (("whole", {"model": WEIGHTS, "step": 3}), ("mixed", {"model": {**WEIGHTS, "n": 3}})):
        dcp.save(state, checkpoint_id=tmp_path / name, no_dist=True)
    merge(tmp_path / "whole", tmp_path / "out")
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == WEIGHTS.keys()
    with pytest.raises(LaunchError, match="'n' is of type int"):
        merge(tmp_path / "mixed", tmp_path / "out")
