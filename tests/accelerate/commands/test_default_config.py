"""Configuration files without questions, against the real one."""

from argparse import ArgumentParser, Namespace
from pathlib import Path

import pytest
import yaml

from drivetrain_accelerate.commands import default_config as ours
from drivetrain_launcher.errors import LaunchError

pytest.importorskip("accelerate", reason="the interface is held against the real one")

from accelerate.commands.config import default as real
from accelerate.commands.config import update as real_update


@pytest.mark.parametrize("precision", ["no", "fp16", "BF16", "fp8"])
def test_the_file_is_that_of_the_real_one(tmp_path: Path, precision: str) -> None:
    mine, theirs = tmp_path / "mine" / "a.yaml", tmp_path / "theirs" / "a.yaml"
    assert ours.write_basic_config(precision, str(mine)) == mine
    assert real.write_basic_config(precision, str(theirs)) == theirs
    assert mine.read_text() == theirs.read_text()


def test_a_file_that_is_there_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("mine")
    assert ours.write_basic_config("no", str(path)) is False
    assert path.read_text() == "mine"
    assert "Configuration already exists at" in capsys.readouterr().out


def test_a_precision_that_is_none_is_refused_as_by_the_real_one(tmp_path: Path) -> None:
    for write in (ours.write_basic_config, real.write_basic_config):
        with pytest.raises(ValueError, match=r"`mixed_precision` should be one of .* Received half"):
            write("half", str(tmp_path / "a.yaml"))


def test_an_older_file_is_updated_as_by_the_real_one(tmp_path: Path) -> None:
    texts: list[str] = []
    for update in (ours.update_config, real_update.update_config):
        path = tmp_path / "a.yaml"
        path.write_text(yaml.safe_dump({"distributed_type": "NO", "fp16": True, "num_processes": 1}))
        assert update(Namespace(config_file=str(path))) == str(path)
        texts.append(path.read_text())
    assert texts[0] == texts[1]


def test_the_commands_write_and_update(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.yaml"
    assert ours.run(ours.DefaultConfigArguments(config_file=path, mixed_precision="bf16")) == 0
    assert ours.run_update(ours.UpdateConfigArguments(config_file=path)) == 0
    assert "accelerate configuration saved at" in capsys.readouterr().out
    assert yaml.safe_load(path.read_text())["mixed_precision"] == "bf16"
    with pytest.raises(LaunchError, match="doesn't exist"):
        ours.run_update(ours.UpdateConfigArguments(config_file=tmp_path / "none.yaml"))


def test_a_program_may_add_the_command_to_its_own(tmp_path: Path) -> None:
    parser = ArgumentParser()
    ours.default_command_parser(parser.add_subparsers(), [])
    args = parser.parse_args(
        ["default", "--config-file", str(tmp_path / "a.yaml"), "--mixed_precision", "fp16"]
    )
    args.func(args)
    assert yaml.safe_load((tmp_path / "a.yaml").read_text())["mixed_precision"] == "fp16"
