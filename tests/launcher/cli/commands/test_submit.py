import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from drivetrain_config import environ, sections

needs_umbrella = pytest.mark.skipif(not sections(only={"run"}), reason="the section run is not installed")

ON = ("submit", "--on", "kubernetes", "--cpu", "--option", "image=x")


@pytest.fixture(autouse=True)
def folder(script: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a script alone."""
    script("print(1)", "train.py")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_dry_run_shows_files_and_command_and_writes_nothing(
    drivetrain_here: Callable, folder: Path
) -> None:
    done = drivetrain_here(*ON, "--num-nodes", "2", "--env", "A=1", "--dry-run", "train.py", "--lr", "a b")
    assert done.returncode == 0, done.stderr
    assert f"# {folder}/logs/train.jobset.yaml\n" in done.stdout
    assert "parallelism: 2\n" in done.stdout
    assert '- "a b"\n' in done.stdout
    assert f'workingDir: "{folder}"' in done.stdout
    assert done.stdout.endswith(f"$ kubectl create --filename={folder}/logs/train.jobset.yaml\n")
    assert [path.name for path in folder.iterdir()] == ["train.py"]
    elsewhere = drivetrain_here(*ON, "--folder", "/workspace", "--dry-run", "no_script_here.py")
    assert 'workingDir: "/workspace"' in elsewhere.stdout, elsewhere.stderr  # the nodes alone have it


def test_a_found_file_is_told_and_its_settings_reach_the_job_which_looks_for_none(
    drivetrain_here: Callable, folder: Path
) -> None:
    (folder / "drivetrain.yaml").write_text("launch: {num_processes: 1}\nstate: {debug: true}\n")
    line = ("submit", "--on", "slurm", "--cpu", "--dry-run")
    done = drivetrain_here(*line, "--processes-per-node", "2", "train.py")
    assert done.returncode == 0, done.stderr
    found = "settings from drivetrain.yaml, found in the working folder; --config none leaves them out"
    assert found in done.stderr
    assert "export DRIVETRAIN_STATE__DEBUG=true\n" in done.stdout
    assert "drivetrain_launcher launch --config=none " in done.stdout
    assert "--processes-per-node=2" in done.stdout  # the flag beats the file's other way to say a number
    without = drivetrain_here(*line, "--config", "none", "train.py")
    assert "DEBUG" not in without.stdout + without.stderr


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (("submit", "train.py"), "--on is missing"),
        (
            ("submit", "--on", "kubernets", "train.py"),
            "cluster kubernets: no installed package provides it; did you mean",
        ),
        ((*ON, "--option", "nodes=3", "train.py"), "kubernetes has no such option"),
        ((*ON, "--option", "image=y", "train.py"), "--option image=y: contradicts --option image=x"),
        ((*ON, "tran.py"), "no such script; did you mean"),
        ((*ON, "--folder", "elsewhere", "train.py"), "--folder elsewhere: does not exist here"),
        pytest.param(
            (*ON, "--mixed-precision", "bf61", "train.py"), "did you mean bf16", marks=needs_umbrella
        ),
        pytest.param((*ON, "--backend", "fsdb", "train.py"), "did you mean fsdp", marks=needs_umbrella),
        ((*ON, "--num-nodes", "2", "--num-processes", "3", "train.py"), "cannot be split evenly"),
        ((*ON, "--node-rank", "0", "train.py"), "the cluster decides the rank of each node"),
        ((*ON, "--env", "RANK=0", "train.py"), "--env RANK: the launcher sets it"),
        ((*ON, "--time", "12", "train.py"), "time '12': say hours"),
        ((*ON, "--nmae", "x", "train.py"), "--nmae: no such flag; did you mean --name"),
    ],
)
def test_bad_input_is_an_error_before_anything_is_written(
    drivetrain_here: Callable, folder: Path, line: tuple[str, ...], message: str
) -> None:
    done = drivetrain_here(*line)
    assert done.returncode == 2
    assert message in done.stderr
    assert [path.name for path in folder.iterdir()] == ["train.py"]


def test_flags_behind_the_script_are_reported(drivetrain_here: Callable) -> None:
    done = drivetrain_here(*ON, "--dry-run", "train.py", "--num-nodes", "2", "--time", "1h")
    assert "--num-nodes, --time stand after train.py, so the script gets them" in done.stderr


def test_a_folder_of_scripts_is_submitted(drivetrain_here: Callable, folder: Path) -> None:
    (folder / "app").mkdir()
    (folder / "app" / "__main__.py").write_text("")
    done = drivetrain_here(*ON, "--dry-run", "app")
    assert (done.returncode, "app" in done.stdout) == (0, True), done.stderr


def test_help_and_submission_import_no_torch(folder: Path, drivetrain: Callable) -> None:
    (folder / "torch.py").write_text("raise ImportError('torch was imported')")
    for line in (("submit", "--help"), (*ON, "--dry-run", "train.py")):
        done = drivetrain(*line, environment={"PYTHONPATH": str(folder)})
        assert done.returncode == 0, done.stderr


def test_ctrl_c_stops_following_and_says_how_to_go_on(folder: Path) -> None:
    """A third party's cluster, whose job never ends, registered by an entry point of its own."""
    package = folder / "endless"
    (package / "endless-1.dist-info").mkdir(parents=True)
    (package / "endless-1.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: endless\nVersion: 1\n"
    )
    (package / "endless-1.dist-info" / "entry_points.txt").write_text(
        "[drivetrain.clusters]\nendless = endless:Endless\n"
    )
    (package / "endless.py").write_text(ENDLESS)
    # What a shell starts in the background ignores SIGINT, and so would the command.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = subprocess.run(
            [sys.executable, "-m", "drivetrain_launcher", "submit", "--on", "endless", "--cpu", "train.py"],
            env=environ.child_environment(PYTHONPATH=str(package)),
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
    finally:
        signal.signal(signal.SIGINT, before)
    assert process.returncode == 130
    assert process.stdout == "working\n"
    where = f"7 --log-dir {folder}/logs"
    assert f"stopped following; job 7 goes on\n  drivetrain job follow {where}\n" in process.stderr
    assert f"  drivetrain job cancel {where}\n" in process.stderr


ENDLESS = """
import os, signal, time
from drivetrain_clusters.protocol import Submission
class Endless:
    def plan(self, request): return Submission(files={}, command=(), request=request)
    def submit(self, submission): return "7"
    def follow(self, job_id, submission, write):
        write("working\\n")
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)
"""


SAVES = """
import os, signal, sys, time
number = os.environ["DRIVETRAIN_LOCAL_JOB_RESTARTS"]
print("start", number, os.getcwd(), sys.argv[1:], flush=True)
if number == "0":
    sys.exit(75)  # as after a save
if "waits" in sys.argv:
    time.sleep(600)
sys.exit(7)
"""


@pytest.mark.costly
def test_a_job_on_this_machine_is_submitted_followed_and_cancelled_from_other_folders(
    drivetrain: Callable, script: Callable, tmp_path: Path
) -> None:
    script(SAVES, "run/train.py")
    # As from a shell in which no environment is active.
    bare = {"PATH": "/usr/bin:/bin"}
    line = ("submit", "--on", "local", "--cpu", "--folder", "run", "--num-processes", "1")
    done = drivetrain(*line, "train.py", "$(touch owned)", environment=bare)
    folder = tmp_path / "run"
    assert done.returncode == 7, done.stderr
    assert done.stdout == "".join(f"start {n} {folder} ['$(touch owned)']\n" for n in (0, 1))
    submitted = drivetrain(*line, "--no-follow", "train.py", "waits", environment=bare)
    assert submitted.returncode == 0, submitted.stderr
    job = submitted.stdout.strip()
    output = tmp_path / "logs" / f"train-{job}.out"
    deadline = time.monotonic() + 60
    while "start 1" not in (output.read_text() if output.exists() else "") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert drivetrain("job", "cancel", job, environment=bare).returncode == 0
    followed = drivetrain("job", "follow", job, environment=bare)
    assert followed.returncode not in (0, 7), followed.stderr
    assert followed.stdout.startswith(f"start 0 {folder} ['waits']\nstart 1 ")
    assert "it has ended" in drivetrain("job", "cancel", job, environment=bare).stderr
    assert not list(tmp_path.rglob("owned"))
