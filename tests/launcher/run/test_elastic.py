"""Several processes under torch's agent, launched as a user launches them."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest

from cluster_jobs import slurm_job
from drivetrain_launcher import LaunchPlan, LaunchTarget
from drivetrain_launcher.plan.core_binding import CoreBinding
from drivetrain_launcher.run.elastic import RankStarter
from drivetrain_launcher.run.keeper.keeper import Keeper
from drivetrain_launcher.run.keeper.keeper_messages import KeeperOptions
from drivetrain_memory.usage.memory_cgroup import find_cgroups
from launch_fixtures import Launch
from launcher.run.running import read_until, wait_for_end
from processes import free_port

# It does not tell of ranks that were stopped.
IS_OLDEST_TORCH = version("torch").startswith("2.9.")
TWO = ("launch", "--num-processes", "2", "script.py")
TWO_MERGED = ("launch", "--no-prefix", "--num-processes", "2", "script.py")


def test_ranks_get_torchruns_variables_two_of_ours_and_their_arguments_and_log_files(
    drivetrain_with_torch: Callable, script: Callable, tmp_path: Path
) -> None:
    file = script(
        "import os, sys\n"
        "names = ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'LOCAL_WORLD_SIZE', 'GROUP_RANK', 'OMP_NUM_THREADS')\n"
        "ours = [name for name in os.environ if name.startswith('DRIVETRAIN_')]\n"
        "print(*(os.environ[name] for name in names), ours, sys.argv[1:], sys.path[0], __name__)\n"
    )
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    rest = ("--help", "$HOME", "$$", "${local_rank}", "a b", "")
    given = ("launch", "--num-processes", "2", "--log-dir", "logs", "script.py", *rest)
    done = drivetrain_with_torch(*given, environment={"TMPDIR": str(scratch)})
    assert done.returncode == 0, done.stderr
    lines = [
        f"{rank} {rank} 2 2 0 1 ['DRIVETRAIN_CONFIG', 'DRIVETRAIN_RANK_OWNER'] {list(rest)} {file.parent} __main__"
        for rank in (0, 1)
    ]
    assert sorted(done.stdout.splitlines()) == [lines[0], f"[rank 1] {lines[1]}"]
    files = sorted((tmp_path / "logs").rglob("stdout.log"))
    assert [file.read_text() for file in files] == [f"{line}\n" for line in lines]
    assert os.listdir(scratch) == []  # nothing is left behind
    assert done.stderr.count("OMP_NUM_THREADS") == 1


@pytest.mark.parametrize(
    ("ending", "code", "stdout", "said"),
    [
        pytest.param("sys.exit(5)", 5, "", "ended with exit code 5, and no exception", id="exit code"),
        pytest.param(
            *("os.kill(os.getpid(), 9)", 137, ""),
            r"was ended by SIGKILL: by another process or user, .*where that is not counted",
            id="signal",
            marks=[pytest.mark.costly, pytest.mark.slow],
        ),
        pytest.param(
            "sys.excepthook = lambda kind, error, traceback: print('hook:', error); raise ValueError('boom')",
            *(1, "hook: boom\n", "failed: ValueError: boom; its traceback stands above"),
            id="the script's own hook",
            marks=[pytest.mark.costly, pytest.mark.slow],
        ),
    ],
)
def test_the_failing_rank_is_named_and_its_exit_code_passes_through(
    launch: Launch, ending: str, code: int, stdout: str, said: str
) -> None:
    done = launch(f"import os, sys, time\nif os.environ['RANK'] == '0': {ending}\ntime.sleep(100)")
    assert done.returncode == code
    assert done.stdout == stdout
    assert re.search(rf"rank 0 .* {said}", done.stderr), done.stderr
    stopped = re.findall(r"^  rank (\d): stopped by the launcher$", done.stderr, re.MULTILINE)
    assert stopped == ([] if IS_OLDEST_TORCH else ["1"])


@pytest.mark.costly
@pytest.mark.default_cases("once")
@pytest.mark.parametrize(
    "numbers", [(signal.SIGINT,), (signal.SIGINT, signal.SIGTERM)], ids=["once", "twice at once"]
)
def test_an_interrupt_lets_every_rank_save(
    started_with_torch: Callable, script: Callable, numbers: tuple[signal.Signals, ...]
) -> None:
    script(
        "import os, time\n"
        "try:\n"
        "    print('ready', os.getppid())\n"
        "    time.sleep(100)\n"
        "except KeyboardInterrupt:\n"
        "    time.sleep(0.3)\n"
        "    print('saved', os.environ['RANK'])\n"
        "    raise\n"
    )
    process = started_with_torch(*TWO_MERGED)
    launcher = int(read_until(process, "ready", count=2).split()[-1])
    os.kill(launcher, signal.SIGSTOP)  # it hears all of them at the same time, however late they are sent
    for number in (*numbers, signal.SIGCONT):
        os.kill(launcher, number)
    output = process.stdout.read()
    assert process.wait(60) == 130
    assert "drivetrain: SIGINT: stopping 2 ranks, which have 30 s to save; once more kills them" in output
    assert {"saved 0", "saved 1"} <= set(output.splitlines())
    assert "killing" not in output
    assert "Traceback" not in output
    assert output.splitlines()[-1] == "drivetrain: stopped by SIGINT; no rank is left"


@pytest.mark.costly
@pytest.mark.slow
def test_a_second_interrupt_kills(started_with_torch: Callable, script: Callable) -> None:
    script(
        "import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nprint('ready')\ntime.sleep(100)\n"
    )
    process = started_with_torch(*TWO_MERGED)
    read_until(process, "ready", count=2)
    process.send_signal(signal.SIGINT)
    read_until(process, "once more kills them")
    time.sleep(1.1)  # within a second it would be the same press of Ctrl-C
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    assert "killing the ranks: what they were saving is left uncommitted" in process.stdout.read()


@pytest.mark.costly
def test_a_rank_that_leaves_early_is_told_apart_from_another_node(launch: Launch) -> None:
    done = launch(
        "import os, pathlib, sys, time\n"
        "from contextlib import suppress\n"
        "from drivetrain_state import barrier, connect, gather_object\n"
        # This process, or the one that the launcher has started and that stands for it.
        "own, started = os.environ['TORCHELASTIC_ERROR_FILE'].encode(), [os.getpid()]\n"
        "for folder in pathlib.Path('/proc').glob('[0-9]*'):\n"
        "    with suppress(OSError):\n"
        "        if own in (folder / 'environ').read_bytes(): started.append(folder.name)\n"
        "context = connect()\n"
        "processes = gather_object(context, started)\n"
        "if context.topology.rank == 1:\n"
        "    context.close()\n"
        "    sys.exit(0)\n"
        # Until the launcher has looked: before, they are still there as zombies.
        "while any(pathlib.Path(f'/proc/{pid}').exists() for pid in processes[1]):\n"
        "    time.sleep(0.01)\n"
        "barrier(context)\n"
    )
    assert done.returncode == 1
    assert done.stderr.endswith("\nAnother rank did not answer: rank 1 ended with exit code 0.\n")
    assert "another node" not in done.stderr


# Whether the launcher would show a hang if this rank ended now.
IS_NOTED = (
    "any(note.read_text().endswith('.txt') "
    "for note in pathlib.Path(os.environ['TORCHELASTIC_ERROR_FILE']).parent.glob('hang.txt'))"
)
_NCCL_WORDS = (
    "terminate called\\n  what(): Exception raised from checkTimeout at NCCL.cpp:690\\nframe #0: c10\\n"
)


@pytest.mark.parametrize(
    ("on_rank_1", "code", "root"),
    [
        pytest.param("gather_object(context, 1)", 1, "rank [01]", id="collective"),
        pytest.param("time.sleep(100)", 124, "rank 1", id="asleep"),
        pytest.param(
            "threading.Thread(target=abort).start(); time.sleep(100)",
            134,
            "rank 1",
            id="abort",
        ),
    ],
)
@pytest.mark.default_cases("collective")
def test_the_watchdogs_table_comes_last(launch: Launch, on_rank_1: str, code: int, root: str) -> None:
    done = launch(
        "import os, pathlib, sys, threading, time\n"
        "from drivetrain_state import barrier, connect, gather_object\n"
        "def abort():\n"
        f"    while not {IS_NOTED}: time.sleep(0.01)\n"
        f"    sys.stderr.write('{_NCCL_WORDS}')\n"
        "    os.abort()\n"
        "context = connect()\n"
        "barrier(context)\n"
        f"if context.topology.rank == 1: {on_rank_1}\n"
        "barrier(context)\n",
        *("--cpu", "--state-hang-timeout-seconds", "0.5", "--state-timeout-seconds", "6"),
    )
    assert done.returncode == code, done.stderr
    before, _, table = done.stderr.rpartition("drivetrain: the hang before it: ")
    assert re.search(rf"drivetrain: {root} \(local rank \d, process \d+\) (failed|was ended|ended)", before)
    row = r"[> ]  [01] .* script\.py:\d+ <module> .*\n"
    heading = r"no progress for .*; likely culprit: .*rank.* 1.*\n +rank .*\n"
    assert re.fullmatch(rf"{heading}{row}{row}All stacks: /.*\.txt\n", table), done.stderr
    assert done.stderr.count("Traceback") == (code == 1)


@pytest.mark.costly
@pytest.mark.slow
def test_an_interrupt_of_a_hang_shows_the_table_last(started_with_torch: Callable, script: Callable) -> None:
    script(
        "import os, pathlib, threading, time\n"
        "from drivetrain_state import barrier, connect\n"
        "def tell():\n"
        f"    while not {IS_NOTED}: time.sleep(0.01)\n"
        "    print('knows', flush=True)\n"
        "threading.Thread(target=tell, daemon=True).start()\n"
        "context = connect()\n"
        "barrier(context)\n"
        "time.sleep(100 * context.topology.rank)\n"
        "barrier(context)\n"
    )
    flags = ("--cpu", "--state-hang-timeout-seconds", "1", "--shutdown-timeout-seconds", "1")
    process = started_with_torch(*TWO_MERGED[:-1], *flags, "script.py")
    read_until(process, "knows", count=2)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    told = process.stdout.read().rpartition("drivetrain: the hang before it: ")[2]
    assert re.match(r"no progress for .*; likely culprit: rank 1: waits for no other rank", told)
    assert re.search(r"\n>  1 .* script\.py:9 <module> .*\n.*\nAll stacks: .*\n\Z", told)


@pytest.mark.costly
def test_a_rank_without_memory_is_told_apart_from_a_killed_one(launch: Launch) -> None:
    group = next((found.folder for found in find_cgroups()), None)
    inner = Path() if group is None else group / f"test_{os.getpid()}"
    try:
        inner.mkdir()
    except OSError:
        pytest.skip("no memory control group can be made here")
    try:
        limit = next(
            (inner / name for name in ("memory.max", "memory.limit_in_bytes") if (inner / name).exists()),
            None,
        )
        if limit is None:
            pytest.skip("the control group limits no memory")
        limit.write_text(str(2**26))
        done = launch(
            "import os, pathlib, time\n"
            "if os.environ['RANK'] == '1':\n"
            f"    pathlib.Path('{inner}/cgroup.procs').write_text(str(os.getpid()))\n"
            "    held = b'x' * 2**28\n"
            "time.sleep(100)\n"
        )
    finally:
        inner.rmdir()
    assert done.returncode == 137
    assert "by SIGKILL: most likely by the kernel, which has killed for lack of memory" in done.stderr


@pytest.mark.costly
@pytest.mark.slow
def test_a_rank_that_does_not_stop_is_killed_when_its_launcher_has_died(
    started_with_torch: Callable, script: Callable
) -> None:
    script(
        "import os, signal, subprocess, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: None)\n"
        "child = subprocess.Popen(['sleep', '200'])\n"
        "os.write(1, b'%d %d\\n' % (os.getpid(), child.pid))\n"
        "while True: time.sleep(1)"
    )
    process = started_with_torch(*TWO_MERGED[:-1], "--shutdown-timeout-seconds", "3", "script.py")
    pids = [int(pid) for _ in range(2) for pid in process.stdout.readline().split()]
    process.send_signal(signal.SIGKILL)
    wait_for_end(pids)


@pytest.mark.parametrize("where", ["flag", pytest.param("job", marks=[pytest.mark.costly, pytest.mark.slow])])
def test_a_port_in_use_is_a_clear_error_that_names_what_it_follows_from(
    drivetrain_with_torch: Callable, script: Callable, where: str
) -> None:
    script("")
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        if where == "flag":
            done = drivetrain_with_torch(*TWO[:-1], "--main-process-port", port, "script.py")
        else:
            task = slurm_job(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)[0]
            done = drivetrain_with_torch("launch", "--cpu", "script.py", environment=task)
    follows = "" if where == "flag" else ", which follows from MASTER_PORT"
    assert done.returncode == 2
    assert f"--master-port {port}{follows}: the port is in use on this machine" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.costly
@pytest.mark.slow
def test_the_failing_rank_is_shown_last_and_once_and_restarted_ranks_meet_anew(launch: Launch) -> None:
    flags = ("--max-restarts", "1", "--master-port", str(free_port()))
    done = launch(
        "import os\n"
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' and dist.get_rank() == 1: raise ValueError('once')\n"
        "total = torch.ones(1)\n"
        "dist.all_reduce(total)\n"
        "print('sum', int(total))\n"
        "dist.destroy_process_group()\n",
        *flags,
    )
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stdout.splitlines() if "[Gloo]" not in line]  # torch 2.9's gloo greets
    assert sorted(said) == ["[rank 1] sum 2", "sum 2"]
    told = "drivetrain: rank 1 failed: ValueError: once; the other ranks stop now, and have 30 s to save\n"
    assert done.stderr.count(told) == 1
    after = done.stderr.partition(told)[2]
    between, traceback, behind = after.partition("drivetrain: rank 1 (local rank 1, process ")
    assert re.fullmatch(r"(drivetrain: the other ranks of this node:\n  rank 0: .*\n)?", between), between
    assert traceback
    assert behind.count("ValueError: once\n") == 1
    assert behind.endswith("ValueError: once\ndrivetrain: restarting all ranks (1 of 1)\n")
    assert "drivetrain_launcher" not in done.stderr


@pytest.mark.costly
@pytest.mark.slow
def test_lines_of_several_ranks_do_not_mix(launch: Launch) -> None:
    done = launch("for _ in range(2000): print('a', 'line', 'in', 'pieces')")
    assert set(done.stdout.splitlines()) == {"a line in pieces", "[rank 1] a line in pieces"}


@pytest.mark.costly
@pytest.mark.slow
def test_a_line_tells_at_once_who_failed_and_the_traceback_comes_last(launch: Launch) -> None:
    done = launch(
        "import os, signal, sys, time\n"
        "def save(*_):\n"
        "    print('saving', file=sys.stderr)\n"
        "    time.sleep(0.5)\n"
        "    print('saved', file=sys.stderr)\n"
        "    sys.exit(1)\n"
        "signal.signal(signal.SIGTERM, save)\n"
        "if os.environ['RANK'] == '1':\n"
        "    while not os.path.exists('ready'): time.sleep(0.01)\n"
        "    raise ValueError('boom')\n"
        "open('ready', 'w').close()\n"
        "time.sleep(100)\n"
    )
    assert done.returncode == 1
    others = [] if IS_OLDEST_TORCH else ["the other ranks of"]
    words = ["drivetrain: rank 1 failed: ValueError: boom", "saving", "saved", *others, "Traceback"]
    places = [done.stderr.index(word) for word in words]
    assert places == sorted(places), done.stderr
    assert done.stderr.endswith("ValueError: boom\n")
    assert done.stderr.count("Traceback") == 1


@pytest.mark.costly
@pytest.mark.slow
@pytest.mark.parametrize("backend", ["c10d", "static"])
def test_two_nodes_meet(started_with_torch: Callable, script: Callable, backend: str) -> None:
    script(
        "import os\n"
        "places = [os.environ[name] for name in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'GROUP_WORLD_SIZE')]\n"
        "total = 'waits for no other'\n"
        "if places[0] in '03':\n"  # one on each node is enough to show that they reach each other
        "    import torch, torch.distributed as dist\n"
        "    store = next(dist.rendezvous('env://'))[0]\n"
        "    dist.init_process_group('gloo', store=store, rank=int(places[0]) // 3, world_size=2)\n"
        "    total = torch.tensor(int(places[0]) + 1)\n"
        "    dist.all_reduce(total)\n"
        "    dist.destroy_process_group()\n"
        "print(*places, 'and', total)\n"
    )
    shared = ("launch", "--num-nodes", "2", "--num-processes", "4", "--rdzv-backend", backend, "--no-prefix")
    place = ("--master-addr", "127.0.0.1", "--master-port", str(free_port()))
    own = [("--node-rank", str(node)) if backend == "static" else ("--rdzv-id", "both") for node in (0, 1)]
    nodes = [started_with_torch(*shared, *place, *each, "script.py") for each in own]
    outputs = [node.stdout.read() for node in nodes]
    assert [node.wait(60) for node in nodes] == [0, 0], outputs
    found = sorted(line for output in outputs for line in output.splitlines() if line[:1].isdigit())
    alone, pair = "and waits for no other", "and tensor(5)"
    assert found == [f"0 0 4 2 {pair}", f"1 1 4 2 {alone}", f"2 0 4 2 {alone}", f"3 1 4 2 {pair}"]


@pytest.mark.skipif(sys.platform != "linux", reason="cores are bound on Linux")
def test_a_rank_starts_on_its_cores_and_the_launcher_keeps_its_own() -> None:
    cores = sorted(os.sched_getaffinity(0))
    bindings = tuple(CoreBinding(cpus=(cpu,), num_cores=1, numa_nodes=(0,)) for cpu in (cores[-1], cores[0]))
    plan = LaunchPlan(mode="elastic", target=LaunchTarget(name="x.py"), bindings=bindings)

    def start_fresh() -> subprocess.Popen[str]:
        tells = "import os; print(*os.sched_getaffinity(0))"
        return subprocess.Popen([sys.executable, "-ISc", tells], stdout=subprocess.PIPE, text=True)

    options = KeeperOptions(launcher=os.getpid(), grace_seconds=1.0, are_same=False, terminals=(False, False))
    with Keeper(options) as keeper:
        starter = RankStarter(plan, None, keeper)
        for local_rank, expected in enumerate((cores[-1], cores[0])):
            process = starter.start(local_rank, {}, (None, None), start_fresh)
            assert isinstance(process, subprocess.Popen)
            assert process.communicate(timeout=60)[0] == f"{expected}\n"
    assert sorted(os.sched_getaffinity(0)) == cores
