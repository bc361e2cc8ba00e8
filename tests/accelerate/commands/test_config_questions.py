"""`drivetrain accelerate config`, which asks drivetrain's questions."""

from pathlib import Path

import pytest

from drivetrain_accelerate.commands.config_questions import QuestionsArguments, run


def test_the_hint_at_the_end_launches_with_the_interface(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.yaml"
    assert run(QuestionsArguments(config_file=file, yes=True)) == 0
    shown = capsys.readouterr().out
    assert f"  drivetrain accelerate launch --config {file} train.py" in shown
    assert "drivetrain launch" not in shown
