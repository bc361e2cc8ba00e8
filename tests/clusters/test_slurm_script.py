import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain_clusters.errors import ClusterError
from drivetrain_clusters.protocol import JobRequest, Submission
from drivetrain_clusters.request_values import memory_bytes
from drivetrain_clusters.slurm.script import plan_slurm

REQUEST = JobRequest(name="train", command=("drivetrain", "launch", "train.py"), folder=Path("/data/run"))
# Anything that a word of a process can hold; the shell's characters often.
WORDS = st.text(
    alphabet=st.one_of(
        st.sampled_from("$`\"'\\;&|<>(){}[]*?~!#%^ \t\n-="), st.characters(exclude_categories=["Cs", "Cc"])
    ),
    max_size=12,
)
# Longer than any of these words.
END = "the words end here"
LINES = WORDS.filter(lambda word: all(ord(each) >= 32 and ord(each) != 127 for each in word))


def script_of(submission: Submission) -> str:
    (text,) = submission.files.values()
    return text


def read_by_bash(text: str) -> tuple[dict[str, str], list[str]]:
    """The environment and the words of srun that bash makes of a script, with a function in srun's place."""
    shown = text.replace("exec srun", "show").replace(
        "#!/bin/bash\n", f"show() {{ printf '%s\\0' \"$@\"; printf '{END}\\0'; env -0; }}\n", 1
    )
    done = subprocess.run(
        ["bash", "-c", shown], env={"PATH": "/usr/bin:/bin"}, capture_output=True, check=True, timeout=60
    )
    assert done.stderr == b""
    words, _, variables = done.stdout.decode(errors="surrogateescape").partition(f"\0{END}\0")
    pairs = (each.partition("=") for each in variables.split("\0") if each)
    return {name: text for name, _, text in pairs}, words.split("\0")


@settings(max_examples=25, deadline=None)
@given(st.lists(WORDS, min_size=1, max_size=5), WORDS)
def test_bash_reads_every_word_and_variable_as_it_was_given(words: list[str], value: str) -> None:
    request = replace(REQUEST, command=("drivetrain", "launch", *words), environment={"VALUE": value})
    variables, read = read_by_bash(script_of(plan_slurm(request)))
    assert read[-len(words) - 4 :] == [sys.executable, "-m", "drivetrain_launcher", "launch", *words]
    assert variables["VALUE"] == value


@given(LINES, LINES, LINES)
def test_names_and_options_reach_no_shell(name: str, comment: str, folder: str) -> None:
    request = replace(REQUEST, name=name, folder=Path(f"/data/{folder}"), options={"comment": comment})
    submission = plan_slurm(request)
    lines = script_of(submission).splitlines()
    # Lines of sbatch hold plain characters alone; other values are whole arguments of a command without a shell.
    options = [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH")]
    assert all(re.fullmatch(r"--[a-z-]+(=[A-Za-z0-9_.,:/@%+=\[\]*-]*)?", option) for option in options)
    given_to_sbatch = {*options, *submission.command[2:-1]}
    assert f"--job-name={name}" in given_to_sbatch
    assert (f"--comment={comment}" if comment else "--comment") in given_to_sbatch
    # Beside comments, nothing but the fixed lines is left.
    rest = [line for line in lines if line and not line.startswith("#")]
    assert [shlex.split(line)[0] for line in rest] == ["export", "export", "exec"]


@given(LINES)
def test_a_name_is_no_path(name: str) -> None:
    (path,) = plan_slurm(replace(REQUEST, name=name)).files
    assert path.parent == Path("logs").absolute()
    assert re.fullmatch(r"[A-Za-z0-9._][A-Za-z0-9._-]*\.sbatch", path.name)


def test_a_request_becomes_options_of_sbatch() -> None:
    request = replace(
        REQUEST, num_nodes=2, processes_per_node=4, accelerators_per_node=4, cpus_per_node=16, memory_per_node="64GB",
        time_limit_seconds=90061, save_seconds=300, options={"partition": "gpu", "exclusive": ""},
    )  # fmt: skip
    script = script_of(plan_slurm(request))
    for line in (
        "#SBATCH --job-name=train",
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --chdir=/data/run",
        f"#SBATCH --output={Path.cwd()}/logs/train-%j.out",
        "#SBATCH --signal=TERM@300",
        "#SBATCH --requeue",
        "#SBATCH --gpus-per-node=4",
        "#SBATCH --cpus-per-task=16",
        "#SBATCH --mem=61036M",
        "#SBATCH --time=25:01:01",
        "#SBATCH --partition=gpu",
        "#SBATCH --exclusive",
        "export DRIVETRAIN_LAUNCH__MAX_REQUEUES=3",
        "export DRIVETRAIN_LAUNCH__SHUTDOWN_TIMEOUT_SECONDS=300",
        "export DRIVETRAIN_LAUNCH__PROCESSES_PER_NODE=4",
    ):
        assert f"{line}\n" in script
    assert "#SBATCH --no-requeue\n" in script_of(plan_slurm(replace(REQUEST, max_requeues=0)))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"options": {"partitoin": "gpu"}}, "option 'partitoin'.*did you mean partition"),
        ({"options": {"wrap": "id"}}, "option 'wrap': sbatch has no such option for a job of drivetrain"),
        ({"options": {"job-name": "x"}}, "option 'job-name': it follows from the job's name"),
        ({"options": {"comment": "a\nb"}}, "comment='a.nb': Slurm takes no control characters"),
        ({"name": "a\0b"}, "name='a.x00b': Slurm takes no control characters"),
        ({"log_dir": Path("100%")}, "log_dir='100%': Slurm replaces %"),
        ({"environment": {"A B": "1"}}, "'A B' is no name of a variable"),
        ({"environment": {"A": "\0"}}, "null character"),
        ({"command": ()}, "has no command"),
        ({"time_limit_seconds": 60}, "time_limit_seconds=60: leaves no time to train.*save_seconds=120"),
        ({"save_seconds": 70000}, "save_seconds=70000: Slurm takes 1 to 65535"),
        ({"num_nodes": 0}, "num_nodes=0: must be at least 1"),
    ],
)
def test_what_slurm_cannot_run_is_refused(changes: dict[str, object], why: str) -> None:
    with pytest.raises(ClusterError, match=f"slurm: .*{why}"):
        plan_slurm(replace(REQUEST, **changes))


@pytest.mark.parametrize(
    ("said", "option"),
    [("64GB", "61036M"), ("64GiB", "64G"), ("1.5TB", "1430512M"), ("1.5 TiB", "1536G"), ("512MB", "489M")],
)
def test_memory_is_the_same_as_on_other_clusters(said: str, option: str) -> None:
    assert f"#SBATCH --mem={option}\n" in script_of(plan_slurm(replace(REQUEST, memory_per_node=said)))
    mebibytes = int(option[:-1]) * (1024 if option.endswith("G") else 1)
    assert 0 <= mebibytes * 2**20 - memory_bytes(said) < 2**20


def test_memory_without_a_unit_is_refused() -> None:
    with pytest.raises(ClusterError, match="memory '64': say a number and a unit"):
        plan_slurm(replace(REQUEST, memory_per_node="64"))
