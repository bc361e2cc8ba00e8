"""The numbers of automatic checkpoints: the one that was just saved is the newest, and stays."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accelerate_sides import OURS, THEIRS, Side

pytest.importorskip("accelerate")


def saved(side: Side, folder: Path, number: int, *, loads: str | None = None, **options: Any) -> list[str]:
    """Save a run some times after a load, "newest" for the newest one; return the names of what is there then.

    Each save is of another weight, and a load of the newest has the last one's.
    """
    project = side("accelerate.utils.ProjectConfiguration")(
        project_dir=str(folder), automatic_checkpoint_naming=True, **options
    )
    with side.accelerator(project_config=project) as accelerator:
        model: Any = accelerator.prepare(nn.Linear(1, 1, bias=False))
        if loads is not None:
            accelerator.load_state(None if loads == "newest" else str(folder / "checkpoints" / loads))
        for _ in range(number):
            torch.nn.init.constant_(model.weight, weight := torch.rand(()).item())
            where = Path(accelerator.save_state())
            assert where.exists()
            if side is OURS:
                accelerator.load_state()
                assert model.weight.item() == weight
    return sorted(each.name for each in (folder / "checkpoints").iterdir())


def names(*numbers: int) -> list[str]:
    return sorted(f"checkpoint_{number}" for number in numbers)


@pytest.mark.parametrize("loads", ["newest", "checkpoint_3"])
@pytest.mark.default_cases("newest")
def test_numbers_go_on_after_a_load_and_the_limit_deletes_the_oldest(tmp_path: Path, loads: str) -> None:
    saved(OURS, tmp_path, 5, total_limit=3)
    assert saved(OURS, tmp_path, 2, loads=loads, total_limit=3) == names(4, 5, 6)


def test_a_run_without_a_load_ends_with_an_error_at_its_first_save(tmp_path: Path) -> None:
    before = saved(OURS, tmp_path, 4, total_limit=2)
    said = r"checkpoint_3 of an earlier run: call load_state\(\).*iteration=4"
    for number in (0, 1, 3):  # of folders that were deleted, and of one that is there
        with pytest.raises(ValueError, match=said):
            saved(OURS, tmp_path, 1, iteration=number, total_limit=2)
    assert saved(OURS, tmp_path, 0) == before
    assert saved(OURS, tmp_path, 1, iteration=7, total_limit=2) == names(3, 7)
    assert saved(OURS, tmp_path, 1, loads="newest", iteration=3, total_limit=1) == names(8)


def test_checkpoints_of_the_real_one_count_and_files_of_other_programs_stay(tmp_path: Path) -> None:
    saved(THEIRS, tmp_path, 2)
    with pytest.raises(ValueError, match="checkpoint_1 of an earlier run"):
        saved(OURS, tmp_path, 1)
    assert saved(OURS, tmp_path, 1, loads="newest", total_limit=2) == names(1, 2)
    other = tmp_path / "checkpoints" / "checkpoint_4"
    other.mkdir()
    (other / "weights.pt").write_bytes(b"1")
    with pytest.raises(ValueError, match=r"holds weights\.pt of another program"):
        saved(OURS, tmp_path, 2, loads="newest", total_limit=1)
    assert (other / "weights.pt").read_bytes() == b"1"


def saved_by_ranks(folder: str) -> tuple[str, str]:
    """Save with a number that the main process alone counts; then as another run does that has not loaded."""
    project = OURS("accelerate.utils.ProjectConfiguration")(
        project_dir=folder, automatic_checkpoint_naming=True, total_limit=1
    )
    with OURS.accelerator(project_config=project) as accelerator:
        accelerator.prepare(nn.Linear(1, 1))
        if accelerator.is_main_process:
            project.iteration = 2
        name = Path(accelerator.save_state()).name
        project.iteration = 0
        try:
            accelerator.save_state()
        except (ValueError, RuntimeError) as error:
            return name, str(error)
    return name, ""


@pytest.mark.slow
def test_ranks_save_into_the_folder_that_the_main_process_counts(tmp_path: Path, run_ranks: Any) -> None:
    for name, error in run_ranks(saved_by_ranks, str(tmp_path)):
        assert name == "checkpoint_2"
        assert "checkpoint_2 of an earlier run" in error
