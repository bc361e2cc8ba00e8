"""Several processes under torch's agent, launched as a user launches them."""

import os
import re
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from processes import free_port

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


def test_ranks_get_torchruns_variables_one_of_ours_and_their_arguments(
    drivetrain: Callable, script: Callable
) -> None:
    script(
        "import os, sys\n"
        "names = ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'LOCAL_WORLD_SIZE', 'GROUP_RANK', 'OMP_NUM_THREADS')\n"
        "ours = [name for name in os.environ if name.startswith('DRIVETRAIN_')]\n"
        "print(*(os.environ[name] for name in names), ours, sys.argv[1:], sys.path[0], __name__)\n"
    )
    rest = ("--help", "$HOME", "$$", "${local_rank}", "a b", "")
    done = drivetrain("launch", "--num-processes", "2", "script.py", *rest)
    assert done.returncode == 0, done.stderr
    folder = str(Path(done.args[0]).parent) and re.search(r"(/\S+) __main__", done.stdout)
    assert folder is not None
    lines = sorted(done.stdout.splitlines())
    assert lines == [
        f"{rank} {rank} 2 2 0 1 ['DRIVETRAIN_CONFIG'] {list(rest)} {folder[1]} __main__" for rank in (0, 1)
    ]
    assert done.stderr.count("OMP_NUM_THREADS") == 1


@pytest.mark.costly
def test_the_failing_rank_is_shown_first_and_once(drivetrain: Callable, script: Callable) -> None:
    script(
        "import os, time\n"
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "if dist.get_rank() == 1: raise ValueError('rank one is lost')\n"
        "dist.barrier()\n"
    )
    done = drivetrain("launch", "--num-processes", "3", "--threads-per-process", "1", "script.py")
    assert done.returncode == 1
    said = done.stderr.index("drivetrain: rank 1 (local rank 1, process ")
    assert "Traceback" not in done.stderr[:said]
    assert done.stderr.count("ValueError: rank one is lost\n") == 1
    others = done.stderr.partition("drivetrain: the other ranks of this node:\n")[2]
    assert re.fullmatch(r"(  rank 0: .*\n)?(  rank 2: .*\n)?", others), others
    assert "drivetrain_launcher" not in done.stderr


@pytest.mark.costly
def test_a_rank_killed_by_a_signal_is_named_with_it(drivetrain: Callable, script: Callable) -> None:
    script("import os, time\nif os.environ['RANK'] == '1': os.kill(os.getpid(), 9)\ntime.sleep(100)")
    done = drivetrain("launch", "--num-processes", "2", "script.py")
    assert done.returncode == 137
    assert re.search(r"rank 1 .* was ended by SIGKILL: most likely the system ran out of memory", done.stderr)
    stopped = re.findall(r"^  rank (\d): was stopped by the launcher$", done.stderr, re.MULTILINE)
    assert stopped in (["0"], [])  # torch 2.9 does not tell of a rank that was stopped


def test_the_exit_code_of_the_failing_rank_passes_through(drivetrain: Callable, script: Callable) -> None:
    script("import os, sys, time\nif os.environ['RANK'] == '0': sys.exit(5)\ntime.sleep(100)")
    done = drivetrain("launch", "--num-processes", "2", "script.py")
    assert done.returncode == 5
    assert "rank 0" in done.stderr
    assert "ended with exit code 5, and no exception" in done.stderr


@pytest.mark.costly
def test_the_scripts_own_hook_has_the_first_word(drivetrain: Callable, script: Callable) -> None:
    script(
        "import os, sys, time\n"
        "sys.excepthook = lambda kind, error, traceback: print('hook:', error)\n"
        "if os.environ['RANK'] == '0': raise ValueError('boom')\n"
        "time.sleep(100)\n"
    )
    done = drivetrain("launch", "--num-processes", "2", "script.py")
    assert done.stdout == "hook: boom\n"
    assert "failed: ValueError: boom; its traceback stands above" in done.stderr


@pytest.mark.costly
def test_interrupting_lets_every_rank_save(started: Callable, script: Callable) -> None:
    script(SAVES_WHEN_INTERRUPTED)
    process = started("launch", "--num-processes", "2", "script.py", "raise")
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
def test_a_second_interrupt_kills(started: Callable, script: Callable) -> None:
    script(
        "import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nprint('ready')\ntime.sleep(100)\n"
    )
    process = started("launch", "--num-processes", "2", "script.py")
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
    started: Callable, script: Callable
) -> None:
    script(SAVES_WHEN_INTERRUPTED)
    process = started("launch", "--num-processes", "2", "script.py", "raise")
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
def test_what_a_failed_rank_has_started_ends_with_it(drivetrain: Callable, script: Callable) -> None:
    script(
        "import os, subprocess, sys\n"
        "child = subprocess.Popen(['sleep', '100'])\n"
        "print(child.pid, flush=True)\n"
        "os._exit(3)\n"
    )
    done = drivetrain("launch", "--num-processes", "2", "script.py")  # ends when nobody holds its output
    assert done.returncode == 3
    assert not any(is_running(int(pid)) for pid in done.stdout.split())


@pytest.mark.costly
def test_a_rank_that_leaves_early_is_told_apart_from_another_node(
    drivetrain: Callable, script: Callable
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
    done = drivetrain("launch", "--num-processes", "2", "script.py")
    assert done.returncode == 1
    assert "Another rank did not answer: most likely it ended early without an error" in done.stderr
    assert "another node" not in done.stderr


@pytest.mark.costly
def test_ranks_stop_when_their_launcher_dies(started: Callable, script: Callable, tmp_path: Path) -> None:
    script("import os, time\nprint(os.getpid())\ntime.sleep(100)")
    process = started("launch", "--num-processes", "2", "--threads-per-process", "1", "script.py")
    ranks = [int(process.stdout.readline()) for _ in range(2)]
    process.kill()
    output = process.stdout.read()  # ends when the last rank has closed it
    assert output.count(f"the launcher (process {process.pid}) of this rank died; the rank stops") == 2
    deadline = time.monotonic() + 30
    while any(map(is_running, ranks)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_running, ranks))


@pytest.mark.slow
def test_a_rank_that_does_not_stop_is_killed_when_its_launcher_has_died(
    started: Callable, script: Callable
) -> None:
    script(
        "import os, signal, subprocess, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: None)\n"
        "child = subprocess.Popen(['sleep', '200'])\n"
        "os.write(1, b'%d %d\\n' % (os.getpid(), child.pid))\n"
        "while True: time.sleep(1)"
    )
    process = started("launch", "--num-processes", "2", "--threads-per-process", "1", "script.py")
    pids = [int(pid) for _ in range(2) for pid in process.stdout.readline().split()]
    process.kill()
    deadline = time.monotonic() + 60
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(is_running, pids))


def is_running(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return state.rpartition(")")[2].split()[0] != "Z"


def test_a_port_in_use_is_a_clear_error(drivetrain: Callable, script: Callable) -> None:
    script("")
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = drivetrain("launch", "--num-processes", "2", "--main-process-port", str(port), "script.py")
    assert done.returncode == 2
    assert f"--master-port {port}: the port is in use on this machine" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.costly
def test_restarted_ranks_meet_anew(drivetrain: Callable, script: Callable) -> None:
    script(
        "import os\n"
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "total = torch.ones(1)\n"
        "dist.all_reduce(total)\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' and dist.get_rank() == 1: raise ValueError('once')\n"
        "print('sum', int(total))\n"
        "dist.destroy_process_group()\n"
    )
    port = str(free_port())
    done = drivetrain(
        "launch", "--num-processes", "2", "--max-restarts", "1", "--master-port", port, "script.py"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == ["sum 2", "sum 2"]
    assert "ValueError: once" in done.stderr
    assert "drivetrain: restarting all ranks (1 of 1)" in done.stderr


def test_output_also_goes_to_files(drivetrain: Callable, script: Callable, tmp_path: Path) -> None:
    script("import os; print('from', os.environ['RANK'])")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    given = ("launch", "--num-processes", "2", "--log-dir", "logs", "script.py")
    done = drivetrain(*given, environment={"TMPDIR": str(scratch)})
    assert sorted(done.stdout.splitlines()) == ["[rank 0] from 0", "[rank 1] from 1"]
    files = sorted((tmp_path / "logs").rglob("stdout.log"))
    assert [file.read_text() for file in files] == ["from 0\n", "from 1\n"]
    assert os.listdir(scratch) == []  # nothing is left behind


@pytest.mark.costly
def test_lines_of_several_ranks_do_not_mix(drivetrain: Callable, script: Callable) -> None:
    script("for _ in range(2000): print('a', 'line', 'in', 'pieces')")
    done = drivetrain("launch", "--num-processes", "2", "script.py")
    assert set(done.stdout.splitlines()) == {"a line in pieces"}


@pytest.mark.costly
@pytest.mark.parametrize("meeting", [("static",), ("c10d", "--rdzv-id", "both")])
def test_two_nodes_meet(started: Callable, script: Callable, meeting: tuple[str, ...]) -> None:
    script(
        "import os\n"
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "total = torch.tensor(dist.get_rank())\n"
        "dist.all_reduce(total)\n"
        "print(dist.get_rank(), os.environ['LOCAL_RANK'], os.environ['GROUP_WORLD_SIZE'], int(total))\n"
        "dist.destroy_process_group()\n"
    )
    shared = ("launch", "--num-nodes", "2", "--num-processes", "4", "--threads-per-process", "1")
    place = ("--master-addr", "127.0.0.1", "--master-port", str(free_port()), "--rdzv-backend", *meeting)
    node_ranks = [("--node-rank", str(node)) if meeting == ("static",) else () for node in (0, 1)]
    nodes = [started(*shared, *place, *node_rank, "script.py") for node_rank in node_ranks]
    outputs = [node.stdout.read() for node in nodes]
    assert [node.wait(60) for node in nodes] == [0, 0], outputs
    found = sorted(line for output in outputs for line in output.splitlines() if line[:1].isdigit())
    assert found == ["0 0 2 6", "1 1 2 6", "2 0 2 6", "3 1 2 6"]


@pytest.mark.costly
def test_a_node_whose_master_never_comes_gives_up(drivetrain: Callable, script: Callable) -> None:
    script("")
    done = drivetrain(
        *("launch", "--num-nodes", "2", "--node-rank", "1", "--processes-per-node", "1"),
        *(
            "--master-addr",
            "127.0.0.1",
            "--master-port",
            str(free_port()),
            "--rdzv-timeout-seconds",
            "3",
            "script.py",
        ),
    )
    assert done.returncode == 2
    assert "the 2 nodes did not meet at 127.0.0.1:" in done.stderr
