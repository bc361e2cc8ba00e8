from pathlib import Path

import torch

from checkpoint.saves import save
from drivetrain_checkpoint import Checkpointer, find_checkpoints
from drivetrain_state import Context

WEIGHT = {"weight": torch.ones(3)}


def test_the_last_saved_comes_first_whatever_its_step(tmp_path: Path, context: Context) -> None:
    for step in (5, 100, 20):
        save(Checkpointer(context, tmp_path), step)
    assert [one.folder.name for one in find_checkpoints(tmp_path)] == ["step-20", "step-100", "step-5"]


def test_it_tells_what_is_wrong_with_each(tmp_path: Path, context: Context) -> None:
    checkpointer = Checkpointer(context, tmp_path)
    (save(checkpointer, 1) / "manifest.json").unlink()
    (save(checkpointer, 2, WEIGHT) / "weights-model.r0.safetensors").write_bytes(b"")
    save(checkpointer, 3)
    by_name = {one.folder.name: one for one in find_checkpoints(tmp_path)}
    assert by_name["step-3"].is_valid
    assert "weights-model.r0.safetensors has 0 bytes" in str(by_name["step-2"].problem)
    assert by_name["step-2"].committed
    assert "never completed" in str(by_name["step-1"].problem)
    assert not by_name["step-1"].committed


def test_an_empty_or_missing_directory_holds_none(tmp_path: Path) -> None:
    assert find_checkpoints(tmp_path) == ()
    assert find_checkpoints(tmp_path / "missing") == ()
