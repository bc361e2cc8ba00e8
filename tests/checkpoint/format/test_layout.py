from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain_checkpoint.errors import StateError
from drivetrain_checkpoint.format.layout import (
    STATE_PART,
    check_model_names,
    model_part,
    next_attempt,
    own_files,
    rank_part,
    step_folder,
    step_folders,
    step_of,
    tensor_file,
    tree_file,
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


def test_parts_have_names_of_their_own() -> None:
    assert len({model_part("state"), model_part("rank-0"), STATE_PART, rank_part(0), rank_part(1)}) == 5


@given(st.integers(min_value=0, max_value=20), st.integers(min_value=0, max_value=2000))
def test_every_file_is_known_as_ours_and_counts_its_attempt(
    tmp_path_factory: pytest.TempPathFactory, attempt: int, rank: int
) -> None:
    folder = tmp_path_factory.mktemp("layout")
    for part in (model_part("model-1"), STATE_PART, rank_part(rank)):
        (folder / tree_file(part, attempt)).touch()
        (folder / tensor_file(part, rank, attempt)).touch()
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
        check_model_names([name])


def test_names_that_differ_in_case_alone_are_refused() -> None:
    with pytest.raises(StateError, match=r"models\['ema'\].*case alone"):
        check_model_names(["EMA", "ema"])
