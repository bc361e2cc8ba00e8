"""`drivetrain accelerate launch`, and `drivetrain launch --as-accelerate`, as a user types them."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.multiprocessing import start_processes

from drivetrain_accelerate.commands import interface_launch as ours
from drivetrain_config import environ
from launch_fixtures import Launch

SHOW = (
    "import os, sys, accelerate\nfrom accelerate import Accelerator\naccelerator = Accelerator()\n"
    "print(type(accelerate).__name__, os.environ['RANK'], os.environ['WORLD_SIZE'], accelerator.num_processes, "
    "accelerator.mixed_precision, sys.argv[1:])"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "script.py").write_text(SHOW)
    (tmp_path / "home" / "accelerate").mkdir(parents=True)
    return tmp_path


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    ranks = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    kept = {name: text for name, text in os.environ.items() if name not in ranks}
    return subprocess.run(
        [sys.executable, "-m", "drivetrain_launcher", *words],
        cwd=folder,
        env={
            **kept,
            "HF_HOME": str(folder / "home"),
            "XDG_CONFIG_HOME": str(folder / "xdg"),
            "OMP_NUM_THREADS": "1",
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["script.py", "--x"], "no ['--x']"),
        (["--mixed-precision", "bf16", "-m", "script", "-y"], "bf16 ['-y']"),
    ],
)
def test_one_process_runs_a_script_or_a_module_with_the_interface(
    folder: Path, words: list[str], shown: str
) -> None:
    done = run(folder, "launch", "--as-accelerate", "--cpu", *words)
    assert done.stdout == f"InterfaceModule 0 1 1 {shown}\n", done.stderr


@pytest.mark.slow
def test_two_processes_do_with_accelerates_flags(folder: Path) -> None:
    done = run(folder, "accelerate", "launch", "--cpu", "--num_processes", "2", "script.py", "--x")
    lines = sorted(line.removeprefix("[1] ").removeprefix("[rank 1] ") for line in done.stdout.splitlines())
    assert len(lines) == 2, done.stderr
    assert "InterfaceModule 0 2 2 no ['--x']" in lines[0]
    assert "InterfaceModule 1 2 2 no ['--x']" in lines[1]


@pytest.mark.slow
def test_a_failing_rank_is_shown_with_the_scripts_own_frames(folder: Path) -> None:
    (folder / "script.py").write_text("import accelerate\nraise ValueError('boom')")
    done = run(folder, "accelerate", "launch", "--cpu", "--num_processes", "2", "script.py")
    assert done.returncode == 1
    assert "ValueError: boom" in done.stderr
    assert "drivetrain_accelerate/__main__.py" not in done.stderr


@pytest.mark.slow
def test_accelerates_default_file_is_read_unless_another_is_found_or_none_is_wanted(folder: Path) -> None:
    file = folder / "home" / "accelerate" / "default_config.yaml"
    file.write_text(
        yaml.safe_dump(
            {"distributed_type": "NO", "mixed_precision": "bf16", "use_cpu": True, "num_processes": 1}
        )
    )
    done = run(folder, "accelerate", "launch", "script.py")
    assert done.stdout == "InterfaceModule 0 1 1 bf16 []\n", done.stderr
    assert f"settings from {file}, found in Accelerate's own place" in done.stderr
    assert (
        " no []" in run(folder, "accelerate", "launch", "--config_file", "none", "--cpu", "script.py").stdout
    )
    (folder / "drivetrain.yaml").write_text("run: {cpu: true}")
    assert " no []" in run(folder, "accelerate", "launch", "script.py").stdout


@pytest.mark.slow
def test_a_plan_shows_the_interface_in_the_command(folder: Path) -> None:
    done = run(folder, "accelerate", "launch", "--dry-run", "--cpu", "--num_processes", "2", "script.py")
    assert "worker.py -m drivetrain_accelerate script.py" in done.stdout


def test_a_flag_without_a_counterpart_is_refused(drivetrain_here: Launch) -> None:
    done = drivetrain_here("accelerate", "launch", "--tpu_use_sudo", "script.py")
    assert done.returncode == 2
    assert "--tpu_use_sudo: the hosts of a slice run a job by `drivetrain submit --on tpu-pod" in done.stderr


@pytest.mark.slow
def test_pods_are_refused_with_what_to_do(folder: Path) -> None:
    done = run(folder, "accelerate", "tpu-config", "--tpu_name", "x", "--debug")
    assert done.returncode == 2
    assert "gcloud compute tpus tpu-vm ssh NAME --worker=all" in done.stderr


@pytest.mark.slow
def test_the_questions_write_a_file_of_drivetrains(folder: Path) -> None:
    done = run(folder, "accelerate", "config", "--yes", "--config_file", "a.yaml")
    assert done.returncode == 0, done.stderr
    assert "Wrote a.yaml" in done.stdout
    assert run(folder, "accelerate", "config", "--yes").returncode == 0
    assert (folder / "xdg" / "drivetrain" / "config.yaml").is_file()


PRELOADED = (
    "import os, sys\nassert 'transformers' in sys.modules, 'not preloaded'\n"
    "from transformers.utils import is_accelerate_available\n" + SHOW
)


@pytest.mark.slow
def test_ranks_are_forked_with_the_interface_and_what_a_library_found_of_it(folder: Path) -> None:
    (folder / "script.py").write_text(PRELOADED)
    launch = ("launch", "--as-accelerate", "--cpu", "--num-processes", "2", "--mixed-precision", "bf16")
    done = run(folder, *launch, "--preload", "accelerate,transformers", "--prefix", "none", "script.py")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"InterfaceModule {rank} 2 2 bf16 []" for rank in "01"]


def test_the_interface_comes_before_what_is_preloaded(folder: Path) -> None:
    launch = ("launch", "--as-accelerate", "--cpu", "--num-processes", "2", "--dry-run")
    done = run(folder, *launch, "--preload", "accelerate", "script.py")
    assert "imports drivetrain_accelerate.auto, accelerate\n" in done.stdout, done.stdout + done.stderr


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
