"""What is measured on a card runs here at tiny sizes, and one script's failure keeps no other's table away."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "cuda"


@pytest.fixture(scope="module")
def run() -> ModuleType:
    sys.path.insert(0, str(FOLDER))  # run.py imports plan.py, as it does when it is a script
    try:
        spec = importlib.util.spec_from_file_location("benchmarks_cuda_run", FOLDER / "run.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(FOLDER))
    return module


@pytest.mark.costly
@pytest.mark.timeout(600)
@pytest.mark.slow
def test_every_script_runs_at_tiny_sizes_and_writes_its_tables(python: str, tmp_path: Path) -> None:
    command = [python, str(FOLDER / "run.py"), "--out", str(tmp_path), "--device", "cpu", "--dry"]
    home = {"HOME": str(tmp_path / "home"), "USERPROFILE": str(tmp_path / "home")}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=580, check=False, env={**os.environ, **home}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not list(tmp_path.rglob("rates.json"))  # measured rates are written where the user plans
    told = (tmp_path / "summary.md").read_text()
    scripts = [path.stem for path in tmp_path.glob("*.log")]
    assert {"small_step", "gpt_step", "gpt_fsdp", "save_held", "offloaded_inference"} <= set(scripts)
    for name in scripts:
        assert f"- {name}: measured in" in told
        assert "dry run" in (tmp_path / f"{name}.md").read_text()
    for name in ("small_step", "gpt_step", "gpt_fsdp", "loader_to_device", "memory_peaks"):
        table = (tmp_path / f"{name}.md").read_text()
        assert "| raw torch |" in table
        assert "| drivetrain |" in table
    assert "by hand 4.404e-05 TFLOP" in (tmp_path / "gpt_step.md").read_text()


def test_without_a_card_only_a_dry_run_begins(
    run: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.main(["--out", str(tmp_path / "out"), "--device", "cpu"]) == 2
    assert capsys.readouterr().out.startswith("no card")
    assert not (tmp_path / "out").exists()


def test_a_script_that_fails_is_told_with_the_end_of_its_log(run: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "fails.py"
    file.write_text("print('left out: torchao (not installed)')\nraise ValueError('no such card')")
    outcome = run.run(
        run.Script(name="fails", file=str(file), limit_seconds=60), [], tmp_path, left_seconds=100
    )
    assert outcome.failed
    told = str(outcome)
    assert told.startswith("- fails: **failed with 1**")
    assert "left out: torchao (not installed)" in told
    assert told.endswith("ValueError: no such card")
    assert "no such card" in (tmp_path / "fails.log").read_text()


def test_a_script_is_ended_at_its_limit_with_what_it_started(run: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "endless.py"
    file.write_text(
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print('begun', child.pid, flush=True)\n"
        "time.sleep(60)"
    )
    script = run.Script(name="endless", file=str(file), limit_seconds=1)
    outcome = run.run(script, [], tmp_path, left_seconds=100)
    assert outcome.failed
    assert str(outcome).startswith("- endless: **ended at its limit**")


def test_the_time_that_is_left_limits_a_script(run: ModuleType, tmp_path: Path) -> None:
    script = run.Script(name="late", file="late.py", limit_seconds=60)
    assert run.limit_of(script, 400) == 60
    assert run.limit_of(script, 40) == 40
    assert run.limit_of(script, 400, slack=4) == 240
    outcome = run.run(script, [], tmp_path, left_seconds=5)
    assert not outcome.failed
    assert str(outcome) == "- late: not begun, for the time was over"


def test_tables_are_chosen_by_name_and_those_that_are_kept_come_last(run: ModuleType, tmp_path: Path) -> None:
    both = ["save_held", "small_step"]
    assert [script.name for script in run.choose(both, kept=[tmp_path])] == ["small_step", "save_held"]
    assert run.choose([], kept=[tmp_path]) == run.SCRIPTS
    (tmp_path / "small_step.md").touch()
    assert [script.name for script in run.choose(both, kept=[tmp_path])] == both
    with pytest.raises(ValueError, match="speed: no such table; there are small_step, "):
        run.choose(["speed"])


def test_every_script_of_the_plan_is_a_file(run: ModuleType) -> None:
    assert all((FOLDER / script.file).is_file() for script in run.SCRIPTS)
    assert len({script.name for script in run.SCRIPTS}) == len(run.SCRIPTS)
