from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain_checkpoint.errors import StateError
from drivetrain_checkpoint.layout import (
    next_attempt,
    own_files,
    plan_parts,
    step_folder,
    step_folders,
    step_of,
)


@given(st.integers(min_value=0))
def test_a_folder_tells_its_step(step: int) -> None:
    assert step_of(step_folder(Path("runs"), step)) == step


@pytest.mark.parametrize("name", ["step-", "step-x", "step-01", "step-1.1", "my-step-1", "step--1"])
def test_other_folders_are_no_checkpoints(name: str) -> None:
    assert step_of(Path(name)) is None


def test_folders_are_listed_by_number(tmp_path: Path) -> None:
    for name in ("step-10", "step-9", "notes"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-1").touch()
    assert [path.name for path in step_folders(tmp_path)] == ["step-9", "step-10"]
    assert step_folders(tmp_path / "missing") == []


def test_parts_have_stems_of_their_own() -> None:
    parts = plan_parts(["model", "state"], world_size=2, attempt=0)
    assert parts.models == {"model": "weights-model", "state": "weights-state"}
    assert (parts.replicated, parts.per_rank) == ("state", ("rank-0", "rank-1"))


@given(st.integers(min_value=0, max_value=20))
def test_every_stem_is_known_as_ours_and_counts_its_attempt(
    tmp_path_factory: pytest.TempPathFactory, attempt: int
) -> None:
    folder = tmp_path_factory.mktemp("layout")
    parts = plan_parts(["model-1"], world_size=1, attempt=attempt)
    for stem in (*parts.models.values(), parts.replicated, *parts.per_rank):
        (folder / f"{stem}.json").touch()
        (folder / f"{stem}.safetensors").touch()
    assert len(own_files(folder)) == 6
    assert next_attempt(folder) == attempt + 1


def test_files_of_others_are_not_ours(tmp_path: Path) -> None:
    for name in ("notes.txt", "state.json.bak", "model.safetensors", "manifest.json"):
        (tmp_path / name).touch()
    assert own_files(tmp_path) == []
    assert next_attempt(tmp_path) == 0


@pytest.mark.parametrize("name", ["", "a/b", "a.b", "..", "ä"])
def test_a_name_that_cannot_be_a_file_is_refused(name: str) -> None:
    with pytest.raises(StateError, match=r"models\[.*letters, digits"):
        plan_parts([name], world_size=1, attempt=0)


def test_names_that_differ_in_case_alone_are_refused() -> None:
    with pytest.raises(StateError, match=r"models\['ema'\].*case alone"):
        plan_parts(["EMA", "ema"], world_size=1, attempt=0)
