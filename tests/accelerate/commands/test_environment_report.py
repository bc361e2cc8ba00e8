"""The report on an environment, against the real one."""

from argparse import Namespace
from pathlib import Path

import pytest
import yaml

from drivetrain_accelerate.commands import environment_report as ours

pytest.importorskip("accelerate", reason="the interface is held against the real one")

from accelerate.commands import env as real


def test_it_has_the_titles_of_the_real_one(capsys: pytest.CaptureFixture[str]) -> None:
    mine = ours.env_command(ours.env_command_parser().parse_args([]))
    text = capsys.readouterr().out
    theirs = real.env_command(Namespace(config_file=None))
    assert list(mine) == list(theirs)
    for title in ("Platform", "Python version", "Numpy version", "PyTorch version", "PyTorch accelerator"):
        assert mine[title] == theirs[title]
    assert mine["System RAM"] == theirs["System RAM"]
    assert mine["`Accelerate` version"].startswith("1.15.0, by drivetrain-accelerate ")
    assert "Copy-and-paste the text below in your GitHub issue" in text


def test_the_command_adds_drivetrains_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(yaml.safe_dump({"distributed_type": "NO", "mixed_precision": "bf16"}))
    assert ours.run(ours.ReportArguments(config_file=path)) == 0
    out = capsys.readouterr().out
    assert "\t- mixed_precision: bf16" in out
    assert "settings files, of which the first is used" in out
    assert str(path) in out
