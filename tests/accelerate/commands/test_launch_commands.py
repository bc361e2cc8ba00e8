"""What programs use to start ranks by themselves, against the real one."""

from pathlib import Path
from typing import Any

import pytest
from torch.multiprocessing import start_processes

from drivetrain_accelerate.commands import launch_commands as ours
from drivetrain_config import environ


def test_a_path_is_added_behind_those_that_a_variable_lists() -> None:
    with environ.exported(SOME_PATH="/b"):
        assert ours.env_var_path_add("SOME_PATH", "/a") == "/b:/a"
    assert ours.env_var_path_add("SOME_PATH_THAT_IS_NOT_SET", "/a") == "/a"


def test_a_started_process_knows_its_rank() -> None:
    seen: list[tuple[str | None, ...]] = []

    def note(word: str) -> None:
        seen.append((word, environ.read("RANK"), environ.read("LOCAL_RANK")))

    ours.PrepareForLaunch(note, "MULTI_CPU")(1, "x")
    with environ.exported(NODE_RANK="2", NPROC="4"):
        ours.PrepareForLaunch(note)(1, "y")
    assert seen == [("x", "1", "1"), ("y", "9", "1")]


def test_processes_cannot_meet_by_a_file_that_nobody_names() -> None:
    with environ.exported(ACCELERATE_DEBUG_RDV_FILE=None, WORLD_SIZE="2"):
        with pytest.raises(
            RuntimeError, match=r"ACCELERATE_DEBUG_RDV_FILE=None, WORLD_SIZE='2'.*debug_launcher"
        ):
            ours.PrepareForLaunch(print, debug=True)(0)


def sum_of_ranks(folder: str, is_ours: bool) -> None:
    """Write the sum of the ranks' numbers, from 1, as Accelerate reduces it."""
    import torch

    if is_ours:
        from drivetrain_accelerate.accelerator.accelerator import Accelerator
    else:
        from accelerate import Accelerator
    accelerator = Accelerator(cpu=True)
    total = accelerator.reduce(torch.tensor([accelerator.process_index + 1.0]), "sum").item()
    Path(folder, str(accelerator.process_index)).write_text(f"{total} {accelerator.num_processes}")


@pytest.mark.slow
@pytest.mark.parametrize("is_ours", [True, False])
def test_processes_meet_by_a_file(tmp_path: Path, is_ours: bool) -> None:
    theirs: Any = pytest.importorskip("accelerate.utils.launch")
    own = {"ACCELERATE_DEBUG_RDV_FILE": str(tmp_path / "met"), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    with environ.exported(**own, MASTER_ADDR="127.0.0.1", MASTER_PORT="29500"):
        function = (ours if is_ours else theirs).PrepareForLaunch(sum_of_ranks, debug=True)
        start_processes(function, args=(str(tmp_path), is_ours), nprocs=2, start_method="fork")
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["3.0 2"] * 2
