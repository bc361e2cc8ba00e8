import json
import re
import signal
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest

from drivetrain_config import environ
from optional_modules import is_installed

SHOW = "import os, sys; print(sys.argv, os.environ.get('RANK'), 'torch' in sys.modules, __name__)"


def test_one_process_runs_in_place_without_torch(drivetrain: Callable, script: Callable) -> None:
    script(SHOW)
    done = drivetrain("launch", "--num-processes", "1", "script.py", "--help", "--num-processes", "3")
    assert done.stdout == "['script.py', '--help', '--num-processes', '3'] 0 False __main__\n"
    told = "drivetrain: --num-processes stands after script.py, so the script gets it and the launcher does not; "
    assert done.stderr.startswith(told)
    assert (done.stderr.count("\n"), done.returncode) == (1, 0)
    through = drivetrain("launch", "--through", "runpy", "script.py", "--num-processes", "3")
    assert "stands after" not in through.stderr  # what a script takes that another module runs is its affair


def test_one_process_runs_a_script_that_reads_torchruns_variables(
    drivetrain_with_torch: Callable, script: Callable
) -> None:
    script(
        "import os\nimport torch.distributed as dist\nfrom drivetrain_state import connect\n"
        "with connect(device='cpu') as context: print(context.group, context.topology.world_size)\n"
        "dist.init_process_group('gloo')\n"
        "print(dist.get_rank(), dist.get_world_size(), os.environ['LOCAL_WORLD_SIZE'])\n"
        "dist.destroy_process_group()\n"
    )
    done = drivetrain_with_torch("launch", "--num-processes", "1", "script.py")
    assert done.stdout == "None 1\n0 1 1\n", done.stderr


def test_one_process_keeps_the_ranks_of_the_launcher_around_it(
    drivetrain: Callable, script: Callable
) -> None:
    script("import os\nprint(os.environ['RANK'], os.environ['WORLD_SIZE'], os.environ.get('MASTER_PORT'))")
    around = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3"}
    assert drivetrain("launch", "script.py", environment=around).stdout == "3 4 None\n"


def test_a_module_runs_in_place(drivetrain: Callable, script: Callable) -> None:
    script(SHOW, "pkg/train.py")
    done = drivetrain("launch", "-m", "pkg.train", "-x")
    assert "-x'] 0 False __main__" in done.stdout


def test_a_program_takes_the_launchers_place(drivetrain: Callable) -> None:
    done = drivetrain("launch", "--program", sys.executable, "-c", "print('a program')")
    assert (done.stdout, done.returncode) == ("a program\n", 0)


def test_exit_codes_and_tracebacks_pass_through(drivetrain: Callable, script: Callable) -> None:
    script("import sys\nif sys.argv[1:]: raise ValueError('boom')\nsys.exit(7)")
    assert drivetrain("launch", "script.py").returncode == 7
    failed = drivetrain("launch", "script.py", "fail")
    assert failed.returncode == 1
    assert failed.stderr.startswith('Traceback (most recent call last):\n  File "')
    assert "drivetrain_launcher" not in failed.stderr


def test_a_setting_error_inside_the_script_keeps_its_traceback(
    drivetrain: Callable, script: Callable
) -> None:
    script("from drivetrain_config import ConfigError\nraise ConfigError('the script says so')")
    done = drivetrain("launch", "script.py")
    assert "Traceback" in done.stderr
    assert done.returncode == 1


def test_interrupting_one_process_is_as_with_python(started: Callable, script: Callable) -> None:
    script("import time\nprint('ready', flush=True)\ntime.sleep(100)")
    process = started("launch", "script.py")
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    output = process.stdout.read()
    assert process.wait(60) == -signal.SIGINT
    assert output.rstrip().endswith("KeyboardInterrupt")
    assert "drivetrain_launcher" not in output


def test_the_script_finds_its_settings_with_their_sources(drivetrain: Callable, script: Callable) -> None:
    script(
        "from drivetrain_config import resolve\nfrom drivetrain_state import StateSettings\n"
        "found = resolve(StateSettings, section='state')\n"
        "print(found.value.hang_timeout_seconds, found.sources['hang_timeout_seconds'])\n"
    )
    done = drivetrain("launch", "--state-hang-timeout-seconds", "7", "script.py")
    assert done.stdout == "7.0 --state-hang-timeout-seconds on the command line\n", done.stderr


def test_a_dry_run_prints_the_plan_alone(
    drivetrain_here: Callable, script: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(script("print('started')").parent)
    done = drivetrain_here("launch", "--dry-run", "--num-processes", "2", "script.py", "--lr", "1")
    assert "2 processes under torch's elastic agent" in done.stdout
    assert "started" not in done.stdout


def test_parallel_sizes_that_do_not_fit_are_refused_before_any_process_starts(
    drivetrain_here: Callable, script: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(script("print('started')").parent)
    line = "launch", "--cpu", "--num-processes", "2"
    done = drivetrain_here(*line, "--parallel-tensor", "3", "script.py")
    assert done.returncode
    assert "tensor=3 makes 3, which does not divide world_size=2" in done.stderr
    assert "started" not in done.stdout
    done = drivetrain_here(*line, "--parallel-tensor", "2", "--dry-run", "script.py")
    assert not done.returncode, done.stderr


def test_a_device_whose_library_does_not_load_is_an_error_without_a_traceback(
    drivetrain_here: Callable, script: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = script("").parent
    (folder / "torch_xla").mkdir()
    (folder / "torch_xla" / "__init__.py").write_text("raise ImportError('undefined symbol')")
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    done = drivetrain_here("launch", "--state-device", "xla", "script.py")
    assert done.returncode == 2
    assert done.stderr.startswith("drivetrain: error: torch-xla is installed and does not load")


@pytest.mark.parametrize("name", ["json.py", "signal.py", "plan.py"])
@pytest.mark.default_cases("signal.py")
def test_a_script_may_be_called_as_a_module_is(drivetrain: Callable, script: Callable, name: str) -> None:
    script("print('mine')", name)
    done = drivetrain("launch", name)
    assert done.stdout == "mine\n", done.stderr


def test_env_prints_json(drivetrain_with_torch: Callable) -> None:
    done = drivetrain_with_torch(
        "env", "--json", "--num-processes", "3", environment={"DRIVETRAIN_STATE__DEBUG": "true"}
    )
    report = json.loads(done.stdout)
    assert report["settings"]["launch"]["num_processes"] == {
        "value": 3,
        "source": "command line",
        "where": "--num-processes",
    }
    assert report["settings"]["state"]["debug"]["where"] == "DRIVETRAIN_STATE__DEBUG"
    assert report["settings"]["state"]["timeout_seconds"]["source"] == "default"
    assert any(line.startswith("cpu") for line in report["devices"])
    versions = report["versions"]
    assert {"torch", "torch built for", "NCCL", "drivetrain-launcher"} <= set(versions)
    for name in ("deepspeed", "transformers"):
        assert versions[name] == (version(name) if is_installed(name) else "not installed")


def test_env_shows_what_was_set_before_the_defaults(drivetrain_with_torch: Callable) -> None:
    shown = drivetrain_with_torch("env", "--num-processes", "3").stdout
    first, _, defaults = shown.partition("settings that are the default, by section\n")
    assert "  launch.num_processes  3  --num-processes on the command line\n" in first
    assert re.search(r"^drivetrain +\S+, all \d+ packages$", first, re.MULTILINE)
    assert re.search(r"^  CPU cores: \d+ of \d+ usable$", first, re.MULTILINE)
    assert "\nlaunch\n  processes_per_node " in defaults
    assert "num_processes  " not in defaults


def test_a_folder_of_scripts(drivetrain: Callable, script: Callable, tmp_path: Path) -> None:
    script("import sys; print(sys.path[0])", "app/__main__.py")
    assert drivetrain("launch", "app").stdout == f"{tmp_path / 'app'}\n"


def test_a_rank_starts_a_launch_of_its_own_with_the_number_of_processes_that_is_asked_for(
    drivetrain: Callable, script: Callable
) -> None:
    script(
        "import os\nprint(os.environ['RANK'], os.environ['WORLD_SIZE'], os.environ.get('TORCHELASTIC_RUN_ID'))"
    )
    around = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "outer"}
    refused = drivetrain("launch", "--num-processes", "1", "script.py", environment=around)
    assert (
        "--num-processes 1: another launcher has started this process as one of WORLD_SIZE=2"
        in refused.stderr
    )
    assert refused.returncode == 2
    with environ.exported(**dict.fromkeys(around), DRIVETRAIN_RANK_OWNER=None):
        environ.put(**around)
        environ.own_rank()  # what this process's children inherit
        inherited = {name: environ.read(name) or "" for name in (*around, "DRIVETRAIN_RANK_OWNER")}
    for flags in (["--num-processes", "1"], []):
        assert drivetrain("launch", *flags, "script.py", environment=inherited).stdout == "0 1 None\n"
