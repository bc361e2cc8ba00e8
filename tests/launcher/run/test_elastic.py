"""Several processes under torch's agent, launched as a user launches them."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path

import pytest

from drivetrain_launcher import LaunchPlan, LaunchTarget
from drivetrain_launcher.plan.core_binding import CoreBinding
from drivetrain_launcher.run.elastic import RankStarter
from drivetrain_launcher.run.keeper.keeper import Keeper
from drivetrain_launcher.run.keeper.keeper_messages import KeeperOptions
from processes import free_port

# It does not tell of ranks that were stopped.
IS_OLDEST_TORCH = version("torch").startswith("2.9.")
SAVES_WHEN_INTERRUPTED = """
import os, sys, time
try:
    print("ready")
    time.sleep(100)
except KeyboardInterrupt:
    time.sleep(0.3)
    print("saved", os.environ["RANK"])
    if "raise" in sys.argv: raise
"""


def test_ranks_get_torchruns_variables_two_of_ours_and_their_arguments_and_log_files(
    drivetrain: Callable, script: Callable, tmp_path: Path
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
    done = drivetrain(*given, environment={"TMPDIR": str(scratch)})
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


@pytest.mark.costly
def test_a_rank_killed_by_a_signal_is_named_with_it(
    drivetrain_with_torch: Callable, script: Callable
) -> None:
    script("import os, time\nif os.environ['RANK'] == '1': os.kill(os.getpid(), 9)\ntime.sleep(100)")
    done = drivetrain_with_torch("launch", "--num-processes", "2", "script.py")
    assert done.returncode == 137
    assert re.search(r"rank 1 .* was ended by SIGKILL: most likely the system ran out of memory", done.stderr)
    stopped = re.findall(r"^  rank (\d): was stopped by the launcher$", done.stderr, re.MULTILINE)
    assert stopped == ([] if IS_OLDEST_TORCH else ["0"])


def test_the_exit_code_of_the_failing_rank_passes_through(
    drivetrain_with_torch: Callable, script: Callable
) -> None:
    script("import os, sys, time\nif os.environ['RANK'] == '0': sys.exit(5)\ntime.sleep(100)")
    done = drivetrain_with_torch("launch", "--num-processes", "2", "script.py")
    assert done.returncode == 5
    assert "rank 0" in done.stderr
    assert "ended with exit code 5, and no exception" in done.stderr


@pytest.mark.costly
def test_the_scripts_own_hook_has_the_first_word(drivetrain_with_torch: Callable, script: Callable) -> None:
    script(
        "import os, sys, time\n"
        "sys.excepthook = lambda kind, error, traceback: print('hook:', error)\n"
        "if os.environ['RANK'] == '0': raise ValueError('boom')\n"
        "time.sleep(100)\n"
    )
    done = drivetrain_with_torch("launch", "--num-processes", "2", "script.py")
    assert done.stdout == "hook: boom\n"
    assert done.returncode == 1
    assert "failed: ValueError: boom; its traceback stands above" in done.stderr


@pytest.mark.costly
def test_interrupting_lets_every_rank_save(started_with_torch: Callable, script: Callable) -> None:
    script(SAVES_WHEN_INTERRUPTED)
    process = started_with_torch("launch", "--no-prefix", "--num-processes", "2", "script.py", "raise")
    lines = iter(process.stdout.readline, "")
    while sum(line == "ready\n" for line in [next(lines)]) == 0:
        pass
    assert next(lines) == "ready\n"
    process.send_signal(signal.SIGINT)
    output = process.stdout.read()
    assert process.wait(60) == 130
    assert "drivetrain: SIGINT: stopping 2 ranks, which have 30 s to save; once more kills them" in output
    assert {"saved 0", "saved 1"} <= set(output.splitlines())
    assert "Traceback" not in output
    assert output.splitlines()[-1] == "drivetrain: stopped by SIGINT; no rank is left"


@pytest.mark.costly
@pytest.mark.slow
def test_a_second_interrupt_kills(started_with_torch: Callable, script: Callable) -> None:
    script(
        "import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nprint('ready')\ntime.sleep(100)\n"
    )
    process = started_with_torch("launch", "--no-prefix", "--num-processes", "2", "script.py")
    seen: list[str] = []
    while seen.count("ready\n") < 2:
        seen.append(process.stdout.readline())
    process.send_signal(signal.SIGINT)
    while "once more kills them" not in seen[-1]:
        seen.append(process.stdout.readline())
    time.sleep(1.1)  # within a second it would be the same press of Ctrl-C
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    assert "killing the ranks: what they were saving is left uncommitted" in process.stdout.read()


@pytest.mark.costly
def test_an_interrupt_that_arrives_twice_at_once_lets_every_rank_save(
    started_with_torch: Callable, script: Callable
) -> None:
    script(SAVES_WHEN_INTERRUPTED)
    process = started_with_torch("launch", "--no-prefix", "--num-processes", "2", "script.py", "raise")
    seen: list[str] = []
    while seen.count("ready\n") < 2:
        seen.append(process.stdout.readline())
    process.send_signal(signal.SIGINT)
    time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    output = process.stdout.read()
    assert process.wait(60) == 130
    assert {"saved 0", "saved 1"} <= set(output.splitlines())
    assert "killing" not in output


@pytest.mark.costly
def test_what_a_failed_rank_has_started_ends_with_it(started_with_torch: Callable, script: Callable) -> None:
    script(
        "import os, subprocess, sys\n"
        "child = subprocess.Popen(['sleep', '100'])\n"
        "print(child.pid, flush=True)\n"
        "os._exit(3)\n"
    )
    # Its output is a pipe, which ends when nobody holds it.
    process = started_with_torch("launch", "--no-prefix", "--num-processes", "2", "script.py")
    output = process.stdout.read()
    assert process.wait(60) == 3
    wait_for_end(int(line) for line in output.splitlines() if line.isdigit())


@pytest.mark.costly
def test_a_rank_that_leaves_early_is_told_apart_from_another_node(
    drivetrain_with_torch: Callable, script: Callable
) -> None:
    script(
        "import torch, sys\n"
        "from drivetrain_state import barrier, connect\n"
        "context = connect()\n"
        "if context.topology.rank == 1:\n"
        "    context.close()\n"
        "    sys.exit(0)\n"
        "barrier(context)\n"
    )
    done = drivetrain_with_torch("launch", "--num-processes", "2", "script.py")
    assert done.returncode == 1
    assert "Another rank did not answer: most likely it ended early without an error" in done.stderr
    assert "another node" not in done.stderr


@pytest.mark.costly
def test_ranks_stop_when_their_launcher_dies(started: Callable, script: Callable) -> None:
    script("import os, time\nprint(os.getpid())\ntime.sleep(100)")
    process = started("launch", "--no-prefix", "--num-processes", "2", "script.py")
    ranks = [int(process.stdout.readline()) for _ in range(2)]
    process.send_signal(signal.SIGKILL)
    output = process.stdout.read()  # ends when the last rank has closed it
    assert (
        output.count(
            f"drivetrain: the launcher (process {process.pid}) died; its ranks stop, and have 30 s to"
        )
        == 1
    )
    wait_for_end(ranks)


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
    flags = ("--no-prefix", "--shutdown-timeout-seconds", "3")
    process = started_with_torch("launch", *flags, "--num-processes", "2", "script.py")
    pids = [int(pid) for _ in range(2) for pid in process.stdout.readline().split()]
    process.send_signal(signal.SIGKILL)
    wait_for_end(pids)


def wait_for_end(pids: Iterable[int]) -> None:
    """Wait until no process is left: a minute, as a rank has half of one to save."""
    running, deadline = list(pids), time.monotonic() + 60
    assert running
    while any(map(is_running, running)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_running, running))


def is_running(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return state.rpartition(")")[2].split()[0] != "Z"


def test_a_port_in_use_is_a_clear_error(drivetrain_with_torch: Callable, script: Callable) -> None:
    script("")
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = drivetrain_with_torch(
            "launch", "--num-processes", "2", "--main-process-port", str(port), "script.py"
        )
    assert done.returncode == 2
    assert f"--master-port {port}: the port is in use on this machine" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.costly
@pytest.mark.slow
def test_the_failing_rank_is_shown_last_and_once_and_restarted_ranks_meet_anew(
    drivetrain_with_torch: Callable, script: Callable
) -> None:
    script(
        "import os\n"
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' and dist.get_rank() == 1: raise ValueError('once')\n"
        "total = torch.ones(1)\n"
        "dist.all_reduce(total)\n"
        "print('sum', int(total))\n"
        "dist.destroy_process_group()\n"
    )
    port = str(free_port())
    done = drivetrain_with_torch(
        "launch", "--num-processes", "2", "--max-restarts", "1", "--master-port", port, "script.py"
    )
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stdout.splitlines() if "[Gloo]" not in line]  # torch 2.9's gloo greets
    assert sorted(said) == ["[rank 1] sum 2", "sum 2"]
    told = "drivetrain: rank 1 failed: ValueError: once; the other ranks stop now, and have 30 s to save\n"
    assert done.stderr.count(told) == 1
    between, traceback, behind = done.stderr.partition(told)[2].partition(
        "drivetrain: rank 1 (local rank 1, process "
    )
    assert re.fullmatch(r"(drivetrain: the other ranks of this node:\n  rank 0: .*\n)?", between), between
    assert traceback
    assert behind.count("ValueError: once\n") == 1
    assert behind.endswith("ValueError: once\ndrivetrain: restarting all ranks (1 of 1)\n")
    assert "drivetrain_launcher" not in done.stderr


@pytest.mark.costly
def test_lines_of_several_ranks_do_not_mix(drivetrain_with_torch: Callable, script: Callable) -> None:
    script("for _ in range(2000): print('a', 'line', 'in', 'pieces')")
    done = drivetrain_with_torch("launch", "--num-processes", "2", "script.py")
    assert set(done.stdout.splitlines()) == {"a line in pieces", "[rank 1] a line in pieces"}


@pytest.mark.costly
@pytest.mark.slow
def test_a_line_tells_at_once_who_failed_and_the_traceback_comes_last(
    drivetrain_with_torch: Callable, script: Callable
) -> None:
    script(
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
    done = drivetrain_with_torch("launch", "--num-processes", "2", "script.py")
    assert done.returncode == 1
    words = [
        "drivetrain: rank 1 failed: ValueError: boom",
        "saving",
        "saved",
        *([] if IS_OLDEST_TORCH else ["the other ranks of"]),
        "Traceback",
    ]
    places = [done.stderr.index(word) for word in words]
    assert places == sorted(places), done.stderr
    assert done.stderr.endswith("ValueError: boom\n")
    assert done.stderr.count("Traceback") == 1


@pytest.mark.costly
@pytest.mark.parametrize(
    "meeting", [("c10d", "--rdzv-id", "both"), pytest.param(("static",), marks=pytest.mark.slow)]
)
@pytest.mark.slow
def test_two_nodes_meet(started_with_torch: Callable, script: Callable, meeting: tuple[str, ...]) -> None:
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
    shared = ("launch", "--num-nodes", "2", "--num-processes", "4")
    place = (
        "--master-addr",
        "127.0.0.1",
        "--master-port",
        str(free_port()),
        "--rdzv-backend",
        *meeting,
        "--no-prefix",
    )
    node_ranks = [("--node-rank", str(node)) if meeting == ("static",) else () for node in (0, 1)]
    nodes = [started_with_torch(*shared, *place, *node_rank, "script.py") for node_rank in node_ranks]
    outputs = [node.stdout.read() for node in nodes]
    assert [node.wait(60) for node in nodes] == [0, 0], outputs
    found = sorted(line for output in outputs for line in output.splitlines() if line[:1].isdigit())
    alone, pair = "and waits for no other", "and tensor(5)"
    assert found == [f"0 0 4 2 {pair}", f"1 1 4 2 {alone}", f"2 0 4 2 {alone}", f"3 1 4 2 {pair}"]


@pytest.mark.costly
@pytest.mark.slow
def test_a_node_whose_master_never_comes_gives_up(drivetrain_with_torch: Callable, script: Callable) -> None:
    script("")
    done = drivetrain_with_torch(
        *("launch", "--num-nodes", "2", "--node-rank", "1", "--processes-per-node", "1"),
        *(
            "--master-addr",
            "127.0.0.1",
            "--master-port",
            str(free_port()),
            "--rdzv-timeout-seconds",
            "1",
            "script.py",
        ),
    )
    assert done.returncode == 2
    assert "the 2 nodes did not meet at 127.0.0.1:" in done.stderr


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
