"""Nothing is left running, whoever is killed and whenever: launcher, keeper, rank or what a rank has started."""

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

import pytest

from launcher.run.running import wait_until

# A rank with a loader's workers, a subprocess, and one that has a process group of its own; a file lets it end.
RANK = """
import os, subprocess, sys, time
from multiprocessing import get_context

os.environ["TEST_ROUND"] = sys.argv[1]

def load():
    time.sleep(300)

children = [subprocess.Popen(["sleep", "300"]), subprocess.Popen(["sleep", "300"], process_group=0)]
if "torch" in sys.argv:
    from torch.utils.data import DataLoader
    loader = iter(DataLoader(range(10_000), batch_size=2, num_workers=1))
    next(loader)
else:
    workers = [get_context("fork").Process(target=load, daemon=True) for _ in range(2)]
    for worker in workers: worker.start()
print("running", os.getpid(), flush=True)
while not os.path.exists(sys.argv[1]):
    print("step")
    time.sleep(0.05)
for child in children: child.kill()
for child in children: child.wait()
"""
VICTIMS = ("launcher", "keeper", "rank", "child")
PRELOADED = (*VICTIMS, "parent")


@pytest.mark.parametrize(
    "victim", ["launcher", *(pytest.param(each, marks=pytest.mark.costly) for each in VICTIMS[1:])]
)
@pytest.mark.default_cases("launcher", "rank")
def test_whoever_is_killed_nothing_is_left(
    started_with_torch: Callable, script: Callable, victim: str
) -> None:
    play_round(started_with_torch, script, victim, 0.0, torch=False)


@pytest.mark.slow
@pytest.mark.timeout(1800)  # 25 rounds, of which five import torch on both ranks
@pytest.mark.parametrize("seed", range(8))
def test_200_rounds_with_a_random_victim_at_a_random_moment(
    started_with_torch: Callable, script: Callable, seed: int
) -> None:
    draw = random.Random(seed)
    for each in range(25):
        # Of seven rounds, five count from the launcher's start: some meet a victim that has just begun.
        moment = draw.uniform(-3.0, 1.2)
        play_round(started_with_torch, script, draw.choice(VICTIMS), moment, torch=each % 5 == 4)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_20_rounds_with_ranks_that_were_forked(started: Callable, script: Callable) -> None:
    # Fresh interpreters: what a test's Python with torch forks has not the command by which a rank is found here.
    draw = random.Random(0)
    for victim in draw.sample(PRELOADED * 4, 20):
        play_round(started, script, victim, draw.uniform(-5.0, 1.2), torch=False, preload=True)


@pytest.mark.slow
@pytest.mark.parametrize("victim", PRELOADED)
def test_whoever_is_killed_nothing_is_left_of_ranks_that_were_forked(
    started: Callable, script: Callable, victim: str
) -> None:
    play_round(started, script, victim, 0.0, torch=False, preload=True)


@pytest.mark.costly
def test_a_process_that_has_left_its_session_lives_on(started_with_torch: Callable, script: Callable) -> None:
    script(
        "import subprocess, time\n"
        "print(subprocess.Popen(['sleep', '300'], start_new_session=True).pid, flush=True)\n"
        "time.sleep(300)\n"
    )
    launcher = started_with_torch(
        "launch", "--cpu", "--num-processes", "2", "--shutdown-timeout-seconds", "2", "script.py"
    )
    daemons: list[int] = []
    while len(daemons) < 2:
        words = launcher.stdout.readline().split()
        daemons += [int(word) for word in words[-1:] if word.isdigit()]
    os.kill(launcher.pid, signal.SIGKILL)
    launcher.wait()
    wait_until(lambda: len(marked(launcher_mark(daemons[0]))) == 2)
    for daemon in daemons:
        os.kill(daemon, signal.SIGKILL)


def launcher_mark(pid: int) -> str:
    """Return what tells the processes of a launch from all others: the folder of the ranks' error files."""
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    file = next(each for each in variables if each.startswith(b"TORCHELASTIC_ERROR_FILE=")).decode()
    return file.partition("/attempt_")[0]


def play_round(
    start: Callable, script: Callable, victim: str, moment: float, *, torch: bool, preload: bool = False
) -> None:
    """Kill a victim `moment` seconds after the first rank runs, or if negative so long after the launcher's start.

    One that has not begun by then is killed as soon as it has.
    """
    mark = f"round-{uuid4()}"
    may_end = script(RANK).with_name(mark)
    launcher = start(
        *("launch", "--cpu", "--num-processes", "2", "--shutdown-timeout-seconds", "3"),
        *(["--preload", "json.tool"] if preload else []),
        *("script.py", mark, *(["torch"] if torch else [])),
    )
    if moment >= 0:
        while "running" not in (line := launcher.stdout.readline()) and line:
            pass
    time.sleep(abs(moment))
    wait_until(lambda: (found := victims(launcher, mark)[victim]) and kill(random.choice(found)))
    may_end.touch()
    launcher.stdout.read()  # ends when nobody holds it, the keeper last
    launcher.wait(60)
    wait_until(lambda: not any(victims(launcher, mark).values()))


def kill(pid: int) -> bool:
    """Kill a process; False if it has just ended."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def victims(launcher: subprocess.Popen[str], mark: str) -> dict[str, list[int]]:
    """Return the running processes of a launch by what they are."""
    listed = subprocess.run(
        ["ps", "-ewwo", "pid,sid,stat,args"], capture_output=True, text=True, check=True
    ).stdout.splitlines()[1:]
    rows = [row.split(None, 3) for row in listed]
    alive = [(int(pid), int(sid), words) for pid, sid, state, words in rows if not state.startswith("Z")]
    commands = {pid: words for pid, _, words in alive}
    of_ranks = {pid: sid for pid, sid, words in alive if mark in words and "worker.py" in words}
    # Ranks and what they are forked off have the same command, and lead sessions; the latter is the launcher's child.
    parents = [pid for pid in of_ranks if "--preload=" in commands[pid] and parent_of(pid) == launcher.pid]
    ranks = [pid for pid, sid in of_ranks.items() if pid == sid and pid not in parents]
    assert launcher.stdout is not None
    pipe = os.readlink(f"/proc/self/fd/{launcher.stdout.fileno()}")
    return {
        "launcher": [launcher.pid] if launcher.poll() is None else [],
        "keeper": [pid for pid, _, words in alive if "keeper/process.py" in words and writes_to(pid, pipe)],
        "rank": ranks,
        "parent": parents,
        "child": sorted((of_ranks.keys() | {*marked(f"TEST_ROUND={mark}")}) - {*ranks, *parents}),
    }


def parent_of(pid: int) -> int:
    """Return the id of a process's parent; 0 if it has ended."""
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def writes_to(pid: int, pipe: str) -> bool:
    """Return whether the output of a process is this pipe."""
    with suppress(OSError):
        return os.readlink(f"/proc/{pid}/fd/1") == pipe
    return False


def marked(text: str) -> list[int]:
    """Return the running processes in whose environment a text stands."""
    found: list[int] = []
    for folder in Path("/proc").iterdir():
        with suppress(OSError):
            if folder.name.isdigit() and text.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found
