from pathlib import Path

import pytest
import torch

from drivetrain_checkpoint import Checkpointer, CorruptCheckpointError, StateError, read_manifest
from drivetrain_checkpoint.manifest import check_files, encode_plan
from drivetrain_state import Context


@pytest.fixture
def saved(tmp_path: Path, context: Context) -> Path:
    return Checkpointer(context, tmp_path).save(
        7,
        models={"model": {"weight": torch.ones(3)}},
        replicated={"optimizer": {"lr": 0.1}},
        per_rank={"rng": torch.get_rng_state()},
        plan={"precision": {"asked": "auto", "applied": "bf16"}},
    )


def test_it_says_what_was_saved_by_what(saved: Path) -> None:
    manifest = read_manifest(saved)
    assert (manifest.step, manifest.world_size, manifest.sequence) == (7, 1, 1)
    assert manifest.plan == {"precision": {"asked": "auto", "applied": "bf16"}}
    assert manifest.libraries["torch"] == torch.__version__.split("+")[0]
    assert set(manifest.files) == {file.name for file in saved.iterdir()} - {"manifest.json"}
    check_files(saved, manifest)


def test_every_changed_byte_of_it_is_noticed(saved: Path) -> None:
    path = saved / "manifest.json"
    content = path.read_bytes()
    for position in range(0, len(content), 7):
        changed = content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :]
        if content[position : position + 1].isspace():
            continue  # what stands between the tokens is no part of what it says
        path.write_bytes(changed)
        with pytest.raises(CorruptCheckpointError, match=r"manifest\.json is damaged"):
            read_manifest(saved)


def test_a_truncated_one_is_damaged(saved: Path) -> None:
    path = saved / "manifest.json"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(CorruptCheckpointError, match=r"manifest.json is damaged"):
        read_manifest(saved)


def test_a_missing_one_means_that_the_save_was_not_completed(saved: Path) -> None:
    (saved / "manifest.json").unlink()
    with pytest.raises(
        CorruptCheckpointError, match=r"manifest.json is missing: this save was never completed"
    ):
        read_manifest(saved)


def test_a_plan_holds_plain_values_only() -> None:
    with pytest.raises(StateError, match=r"^plan: 'x' is a tensor"):
        encode_plan({"x": torch.ones(1)})
    with pytest.raises(StateError, match=r"^plan\['f'\]: it is a "):
        encode_plan({"f": print})
