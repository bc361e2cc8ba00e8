from pathlib import Path

import pytest

from drivetrain_checkpoint import Checkpointer, CheckpointSettings
from drivetrain_state import Context


def test_the_directory_of_the_call_beats_that_of_the_settings(tmp_path: Path, context: Context) -> None:
    settings = CheckpointSettings(directory=tmp_path / "settings")
    assert Checkpointer(context, settings=settings).directory == tmp_path / "settings"
    assert Checkpointer(context, str(tmp_path / "call"), settings=settings).directory == tmp_path / "call"


def test_without_a_directory_it_asks_for_one(context: Context) -> None:
    with pytest.raises(ValueError, match="directory=None: name the folder"):
        Checkpointer(context)


def test_a_later_change_of_the_working_directory_moves_nothing(
    tmp_path: Path, context: Context, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert Checkpointer(context, "runs").directory == tmp_path / "runs"
