"""The large example: what it leaves behind, and that stopping and going on changes nothing."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from example_launching import launch

pytestmark = pytest.mark.timeout(400)

TINY = (
    "--batch-size",
    "4",
    "--block-size",
    "32",
    "--width",
    "64",  # two heads, which two ranks divide: whole ones read positions that a rank lacks
    "--layers",
    "2",  # for two stages
    "--validation-windows",
    "11",
)


def logged(project_dir: Path, name: str) -> dict[int, float]:
    """The values of one name by step."""
    lines = (project_dir / "log.jsonl").read_text().splitlines()
    return {record["step"]: record[name] for record in map(json.loads, lines) if name in record}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, python: str) -> Path:
    """The project folder of a run of 20 steps on two processes, with a checkpoint at 10."""
    project_dir = tmp_path_factory.mktemp("runs") / "bytes"
    run = launch(
        "train_bytes.py",
        *TINY,
        "--steps",
        "20",
        "--save-every",
        "10",
        "--project-dir",
        str(project_dir),
        python=python,
        num_processes=2,
    )
    assert "class " in run.stdout  # what the sample begins with
    assert "step 10: train loss" in run.stderr
    return project_dir


def test_leaves_log_plot_and_checkpoints(finished: Path) -> None:
    assert list(logged(finished, "train loss")) == [10, 20]
    assert list(logged(finished, "validation loss")) == [10, 20]
    assert (finished / "loss.png").stat().st_size > 1000
    assert len(list((finished / "checkpoints").glob("step-*"))) >= 2


def test_refuses_to_mix_two_runs_in_one_folder(run_example: Callable, finished: Path) -> None:
    with pytest.raises(AssertionError, match="go on with --resume"):
        run_example("train_bytes.py", *TINY, "--project-dir", str(finished), num_processes=1)


@pytest.mark.parametrize("num_processes", [1, 2])
@pytest.mark.slow
def test_resumes_exactly_on_any_number_of_processes(
    run_example: Callable, finished: Path, tmp_path: Path, num_processes: int
) -> None:
    again = tmp_path / "again"
    shutil.copytree(finished, again)
    newest = max((again / "checkpoints").glob("step-*"))
    shutil.rmtree(newest)
    args = ("--steps", "20", "--save-every", "10", "--project-dir", str(again), "--resume")
    run = run_example("train_bytes.py", *TINY, *args, num_processes=num_processes)
    assert "step 10:" not in run.stderr
    for name in ("train loss", "validation loss"):
        assert logged(again, name)[20] == pytest.approx(logged(finished, name)[20], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("num_processes", [1, 2])
def test_ctrl_c_saves_and_says_how_to_go_on(
    run_example: Callable, tmp_path: Path, num_processes: int
) -> None:
    args = (*TINY, "--save-every", "10", "--project-dir", str(tmp_path / "run"))
    run = launch(
        "train_bytes.py", *args, "--steps", "100000", num_processes=num_processes, interrupt_at="step 10:"
    )
    assert "stopped; the same command with --resume goes on from here" in run.stderr
    stopped_at = max(logged(tmp_path / "run", "train loss"))
    assert stopped_at < 100000

    steps = ("--steps", str(stopped_at + 10))
    run_example("train_bytes.py", *args, *steps, "--resume", num_processes=num_processes)
    assert list(logged(tmp_path / "run", "train loss"))[-2:] == [stopped_at, stopped_at + 10]


@pytest.mark.parametrize(
    ("flags", "num_processes"),
    [
        pytest.param(("--backend", "fsdp"), 2, marks=pytest.mark.slow),
        pytest.param(("--backend", "deepspeed", "--deepspeed-stage", "3"), 2, marks=pytest.mark.slow),
        pytest.param(("--parallel-tensor", "2"), 2, marks=pytest.mark.slow),
        pytest.param(("--parallel-tensor", "2"), 4, marks=pytest.mark.slow),
        pytest.param(("--parallel-pipeline", "2"), 2, marks=pytest.mark.slow),
        pytest.param(("--parallel-tensor", "2", "--parallel-sequence"), 2, marks=pytest.mark.slow),
        pytest.param(("--parallel-context", "2"), 2, marks=pytest.mark.slow),
        pytest.param(("--parallel-context", "2", "--parallel-tensor", "2"), 4, marks=pytest.mark.slow),
        pytest.param(
            ("--backend", "deepspeed", "--deepspeed-stage", "3", "--parallel-context", "2"),
            2,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("--backend", "fsdp", "--parallel-tensor", "2", "--parallel-shard", "2"),
            4,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_trains_alike_under_every_backend_and_product_with_no_change_to_the_file(
    finished: Path, tmp_path: Path, python: str, flags: tuple[str, ...], num_processes: int
) -> None:
    launch(
        "train_bytes.py",
        *TINY,
        "--steps",
        "20",
        "--save-every",
        "10",
        "--project-dir",
        str(tmp_path / "run"),
        python=python,
        num_processes=num_processes,
        launcher=flags,
    )
    for name in ("train loss", "validation loss"):
        assert logged(tmp_path / "run", name) == pytest.approx(logged(finished, name), rel=1e-3)
