"""The settings file without a terminal: written, converted, found again, shown, checked and changed."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from drivetrain_launcher.cli.main import main

ACCELERATE = """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_sharding_strategy: FULL_SHARD
  fsdp_version: 1
mixed_precision: bf16
num_machines: 1
num_processes: 2
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project's folder of its own, as the working folder, and a user without settings."""
    found = tmp_path / "project"
    (found / ".git").mkdir(parents=True)
    monkeypatch.chdir(found)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    return found


SEED = "run:\n  seed: 1\n"


@pytest.mark.parametrize(
    ("text", "command", "code", "words"),
    [
        ("", "", 2, ["there is no terminal to ask on: say --yes"]),
        ("", "--yes --output drivetrain.txt", 2, ["the file is YAML; say a name that ends in .yaml"]),
        (
            "",
            "--yes --backend fspd",
            2,
            ["run.backend='fspd': no installed package provides it; did you mean fsdp"],
        ),
        (SEED, "--yes", 2, ["drivetrain.yaml is there: say --force to replace it"]),
        ("", "shwo", 2, ["config shwo: no such command; did you mean config show"]),
        ("", "validate", 2, ["no settings file is found (drivetrain.yaml, "]),
        ("", "update --set run.seed=1", 2, ["no settings file is found (drivetrain.yaml, "]),
        (
            "run:\n  mixed_precison: bf16\nlunch:\n  num_nodes: 2\n",
            "validate",
            1,
            [
                "error: drivetrain.yaml:2: section 'run' has no field 'mixed_precison'; did you mean",
                "error: drivetrain.yaml:3: there is no section 'lunch'; did you mean launch",
            ],
        ),
        (
            "run:\n  backend: dpd\nlaunch:\n  cluster: slrum\n",
            "validate drivetrain.yaml",
            1,
            [
                "error: run.backend='dpd': no installed package provides it; did you mean ddp",
                "from drivetrain.yaml:2",
                "error: launch.cluster='slrum': no installed package provides it; did you mean slurm",
            ],
        ),
        (
            "run:\n  backend: mine\n",
            "validate",
            0,
            ["run.backend='mine': no package provides it in this environment"],
        ),
        (
            "launch:\n  num_processes: 3\n  num_nodes: 2\n",
            "validate",
            1,
            ["launch.num_processes=3: counts the processes of all nodes together"],
        ),
        (
            "run:\n  backend: ddp\nfsdp:\n  offload: true\n",
            "validate",
            0,
            [
                "drivetrain.yaml: 2 settings, all valid\n",
                "drivetrain.yaml:3: section 'fsdp' has no effect while run.backend is 'ddp'",
            ],
        ),
        (SEED, "update --set run.seed=1", 0, ["drivetrain.yaml: nothing to change\n"]),
        (
            SEED,
            "update --set run.sed=1",
            2,
            ["--set on the command line: section 'run' has no field 'sed'; did you mean seed"],
        ),
        (SEED, "update --set rnu.seed=1", 2, ["there is no section 'rnu'; did you mean run"]),
        (
            SEED,
            "update --set run.seed=many",
            2,
            ["run.seed='many': must be an integer or null; from --set on the command line"],
        ),
        (
            SEED,
            "update --set run.backend=dpd",
            2,
            ["run.backend='dpd': no installed package provides it; did you mean ddp; say one of"],
        ),
        (
            SEED,
            "update --set run.log_with=jsonl,wandbb",
            2,
            ["run.log_with='wandbb': no installed package provides it; did you mean"],
        ),
        (SEED, "update --set run.seed=-1", 2, ["run.seed=-1: must lie between 0 and 2**63 - 1"]),
        (SEED, "update --set seed", 2, ["'seed': say SECTION.FIELD=VALUE"]),
        (SEED, "update --unset run.bakend", 2, ["section 'run' has no field 'bakend'; did you mean backend"]),
    ],
)
def test_what_is_wrong_or_needs_no_change_is_told_and_leaves_the_file(
    text: str, command: str, code: int, words: list[str], folder: Path, drivetrain_here: Callable
) -> None:
    file = folder / "drivetrain.yaml"
    if text:
        file.write_text(text)
    done = drivetrain_here("config", *command.split())
    assert done.returncode == code, done.stderr
    assert [each for each in words if each not in done.stdout + done.stderr] == []
    assert [path.read_text() for path in folder.glob("drivetrain*")] == ([text] if text else [])


def test_yes_takes_every_recommendation_and_a_launch_finds_the_file(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(["config", "--yes", "--num-processes", "2", "--state-device", "cpu", "--project-dir", "out"])
        == 0
    )
    assert (
        "drivetrain launch --num-processes 2 --backend auto --project-dir out"
        in capsys.readouterr().out.replace(" \\\n     ", "")
    )
    (folder / "train.py").write_text("")
    (folder / "deeper").mkdir()
    assert main(["launch", "--dry-run", "train.py"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("2 processes")
    assert (
        "note: settings from drivetrain.yaml, found in the working folder; --config none leaves them out"
        in shown
    )


@pytest.mark.slow
def test_a_launch_tells_once_of_a_file_that_it_found_and_not_of_one_that_was_named(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "drivetrain.yaml").write_text(SEED)
    (folder / "train.py").write_text("import os; print('DRIVETRAIN_CONFIG' in os.environ)")
    for flags, told in (([], 1), (["--config", "drivetrain.yaml"], 0), (["--config", "none"], 0)):
        done = subprocess.run(
            [sys.executable, "-m", "drivetrain_launcher", "launch", "--cpu", *flags, "train.py"],
            capture_output=True,
            text=True,
            timeout=100,
            check=True,
        )
        assert done.stderr.count("settings from drivetrain.yaml, found in the working folder") == told


def test_a_file_of_the_user_that_changes_a_run_is_in_its_plan_and_in_its_errors(
    tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "home" / ".config" / "drivetrain" / "config.yaml"
    path.parent.mkdir(parents=True)
    path.write_text("launch:\n  num_processes: 3\nstate:\n  device: cpu\n")
    (folder / "train.py").write_text("")
    assert main(["launch", "--dry-run", "train.py"]) == 0
    assert f"note: settings from {path}, found in the user's folder" in capsys.readouterr().out
    path.write_text("launch:\n  num_proceses: 3\n")
    assert main(["launch", "--dry-run", "train.py"]) == 2
    assert f"{path}:2: section 'launch' has no field 'num_proceses'; did you mean" in capsys.readouterr().err


def test_a_file_that_is_replaced_by_force_is_kept_as_a_copy(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "drivetrain.yaml").write_text(SEED)
    assert main(["config", "--yes", "--force"]) == 0
    assert "the one that was there is drivetrain.yaml.bak" in capsys.readouterr().out
    assert (folder / "drivetrain.yaml.bak").read_text() == SEED
    assert yaml.safe_load((folder / "drivetrain.yaml").read_text())["run"]["seed"] == 1


def test_a_folder_that_cannot_be_written_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "taken").write_text("")
    assert main(["config", "--yes", "--output", "taken/drivetrain.yaml"]) == 2
    assert "taken/drivetrain.yaml: cannot be written" in capsys.readouterr().err


def test_a_variable_that_will_win_over_the_file_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DRIVETRAIN_RUN__SEED", "7")
    assert main(["config", "--yes"]) == 0
    assert "DRIVETRAIN_RUN__SEED in the environment wins over run.seed of the file" in capsys.readouterr().err


def test_accelerates_file_is_converted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "default_config.yaml").write_text(ACCELERATE)
    assert main(["config", "--from", "default_config.yaml"]) == 0
    assert "fsdp_version: 1: FSDP2 is what runs" in capsys.readouterr().err
    written = (folder / "drivetrain.yaml").read_text()
    assert yaml.safe_load(written) == {
        "launch": {"num_processes": 2, "num_nodes": 1},
        "run": {"mixed_precision": "bf16", "backend": "fsdp"},
        "fsdp": {"strategy": "full_shard"},
    }
    assert "# Why: as in default_config.yaml:6.\n  mixed_precision: bf16" in written


@pytest.mark.slow
def test_env_prints_the_places_and_which_file_is_used(folder: Path, python: str) -> None:
    def env(*flags: str) -> str:
        command = [python, "-m", "drivetrain_launcher", "env", *flags]
        return subprocess.run(command, capture_output=True, text=True, timeout=150, check=True).stdout

    (folder / "drivetrain.yaml").write_text(SEED)
    (folder / "other.yaml").write_text("run:\n  seed: 2\n")
    report = json.loads(env("--json"))
    assert report["settings_files"]["drivetrain.yaml"] == "used, the working folder"
    assert list(report["settings_files"].values())[-1] == "no file, the user's folder"
    assert report["settings"]["run"]["seed"]["where"] == "drivetrain.yaml:2"
    shown = env("--config", "other.yaml")
    assert "  other.yaml: used, named by --config\n  drivetrain.yaml: not used, the working folder\n" in shown


def test_show_prints_yaml_with_the_source_of_each_setting(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "drivetrain.yaml").write_text(
        "run:\n  seed: 1\n  mixed_precision: bf16\ncheckpoint:\n  storage_options: {key: hidden}\n"
    )
    monkeypatch.setenv("DRIVETRAIN_RUN__SEED", "2")
    assert main(["config", "show", "--gradient-accumulation-steps", "4"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("# file: drivetrain.yaml, found in the working folder\n")
    assert "hidden" not in shown
    values = yaml.safe_load(shown)
    assert values["run"]["seed"] == 2
    assert values["run"]["gradient_accumulation_steps"] == 4
    assert values["state"]["watchdog"] is True
    for line, source in (
        ("seed: 2", "DRIVETRAIN_RUN__SEED in the environment"),
        ("mixed_precision: bf16", "drivetrain.yaml:3"),
        ("gradient_accumulation_steps: 4", "--gradient-accumulation-steps on the command line"),
        ("watchdog: true", "default"),
        ("# storage_options: a secret", "from drivetrain.yaml:5"),
    ):
        assert any(each.strip().startswith(line) and each.endswith(source) for each in shown.splitlines()), (
            line
        )
    assert main(["config", "show", "--no-defaults"]) == 0
    assert "default" not in capsys.readouterr().out


def test_update_takes_a_plugin_that_the_script_may_register_and_says_so(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "drivetrain.yaml").write_text(SEED)
    assert main(["config", "update", "--set", "run.backend=mine"]) == 0
    shown = capsys.readouterr().out
    assert (
        "run.backend: unset -> mine\nrun.backend='mine': no package provides it in this environment" in shown
    )
    assert (folder / "drivetrain.yaml").read_text().endswith("backend: mine\n")


def test_update_sets_and_unsets_and_keeps_comments_and_order(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "drivetrain.yaml").write_text(
        "# mine\nrun:\n  seed: 1  # the year\n  # why bf16\n  mixed_precision: 'bf16'\nstate:\n  debug: true\n"
    )
    changes = ["--set", "run.seed=2", "--set", "run.log_with=jsonl,wandb", "--set", "run.project_dir=out"]
    assert (
        main(["config", "update", *changes, "--set", "ddp.static_graph=true", "--unset", "state.debug"]) == 0
    )
    shown = capsys.readouterr().out
    assert "run.seed: 1 -> 2\n" in shown
    assert "run.log_with: unset -> [jsonl, wandb]\n" in shown
    assert "state.debug: true -> unset\n" in shown
    text = (folder / "drivetrain.yaml").read_text()
    assert text.startswith("# mine\nrun:\n  seed: 2  # the year\n  # why bf16\n  mixed_precision: 'bf16'\n")
    assert "  # Trackers to log to, such as jsonl; all: every installed one.\n  log_with:" in text
    assert yaml.safe_load(text)["ddp"] == {"static_graph": True}
    assert (folder / "drivetrain.yaml.bak").read_text().startswith("# mine\nrun:\n  seed: 1")


def test_a_setting_goes_with_its_own_help_and_no_other_comment(folder: Path) -> None:
    file = folder / "drivetrain.yaml"
    file.write_text("run:\n  mixed_precision: no\n")
    assert main(["config", "update", "--set", "run.seed=7", "--set", "run.backend=ddp"]) == 0
    both = file.read_text()
    assert main(["config", "update", "--unset", "run.seed"]) == 0
    seed = next(index for index, line in enumerate(both.splitlines()) if line.strip() == "seed: 7")
    assert file.read_text().splitlines() == [
        line for index, line in enumerate(both.splitlines()) if index not in (seed - 1, seed)
    ]
    file.write_text("run:\n  # mine\n  seed: 1\n  log_with:\n  - jsonl\n  # of the backend\n  backend: ddp\n")
    assert main(["config", "update", "--unset", "run.log_with", "--unset", "run.seed"]) == 0
    assert file.read_text() == "run:\n  # mine\n  # of the backend\n  backend: ddp\n"


def test_update_turns_accelerates_file_into_drivetrains(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "a.yaml").write_text(ACCELERATE)
    assert main(["config", "update", "a.yaml", "--set", "run.seed=3"]) == 0
    assert "a.yaml: was Accelerate's, and is drivetrain's now" in capsys.readouterr().out
    assert yaml.safe_load((folder / "a.yaml").read_text())["run"] == {
        "mixed_precision": "bf16",
        "backend": "fsdp",
        "seed": 3,
    }
    assert (folder / "a.yaml.bak").read_text() == ACCELERATE


def test_the_help_of_config_names_its_members(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["config", "--help"])
    assert "drivetrain config show, drivetrain config update, drivetrain config validate" in " ".join(
        capsys.readouterr().out.split()
    )


def test_several_machines_are_told_that_each_launch_needs_its_rank(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["config", "--yes", "--num-nodes", "2", "--master-addr", "node0"]) == 0
    shown = capsys.readouterr().out
    assert "  drivetrain launch --node-rank N train.py\n\nis on each machine, with its own N from 0," in shown
    assert main(["config", "--yes", "--force", "--num-nodes", "2", "--rdzv-backend", "c10d"]) == 0
    assert "--node-rank" not in capsys.readouterr().out


def test_without_the_library_that_keeps_comments_update_names_the_extra(folder: Path) -> None:
    (folder / "drivetrain.yaml").write_text(SEED)
    source = (
        "import sys; sys.modules['ruamel.yaml'] = None\n"
        "from drivetrain_launcher.cli.main import main; sys.exit(main(['config', 'update', '--set', 'run.seed=2']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 2
    assert "pip install 'drivetrain-launcher[wizard]', or change the file in an editor" in done.stderr
    assert (folder / "drivetrain.yaml").read_text() == SEED
