"""A hang names its culprit: real processes that hang in the ways that happen, and what is said of them."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from drivetrain_state.hang.monitor import HANG_EXIT_CODE
from processes import Completed

pytestmark = pytest.mark.costly  # a hang takes its time

RunScript = Callable[..., list[Completed]]

# The ranks meet in a gloo group. `step()` is one that all take part in; hangs are asked about after three seconds.
GROUP = """
import glob, os, sys, threading, time
from drivetrain_state import StateSettings, connect, gather_object, reduce
import torch
import torch.distributed as dist

os.makedirs(sys.argv[1], exist_ok=True)
os.chdir(sys.argv[1])  # where the stacks are written
timeout = float(os.environ.get("TEST_TIMEOUT", "100"))
settings = StateSettings(device="cpu", hang_timeout_seconds=3, timeout_seconds=timeout)
# setup
context = connect(settings)
rank, size, watch = context.topology.rank, context.topology.world_size, context.progress

def step():
    reduce(context, torch.ones(2))

def leave():
    dist.barrier()
    context.close()

def is_reported():
    return bool(glob.glob("hang-*.txt"))

def report_pipe():
    "A pipe to read from until a hang is reported."
    reads, writes = os.pipe()
    def tell():
        while not is_reported():
            time.sleep(0.05)
        os.write(writes, b"!")
    threading.Thread(target=tell, daemon=True).start()
    return reads

step()
"""

# The ranks share nothing but a store, which the last rank hosts: a rank may be killed without gloo saying so first.
STORE_ONLY = """
import os, signal, subprocess, sys, threading, time
from datetime import timedelta
from pathlib import Path
import torch.distributed as dist
from drivetrain_state.settings import StateSettings
from drivetrain_state.topology import Topology
from drivetrain_state.hang.progress_record import ProgressRecord
from drivetrain_state.hang.watchdog import start_watchdog

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
TIMEOUT = float(os.environ.get("TEST_TIMEOUT", "100"))
store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), size, is_master=rank == size - 1)
settings = StateSettings(hang_timeout_seconds=2, timeout_seconds=TIMEOUT)
topology = Topology(rank=rank, world_size=size, local_rank=rank, local_world_size=size)
watch = ProgressRecord()
shared = dist.PrefixStore("run", store)
watchdog = start_watchdog(
    topology=topology, settings=settings, record=watch, store=shared, report_directory=Path(sys.argv[1])
)

def meet(name):
    "Wait until every rank has come here."
    watch.mark(name)
    if shared.add(name, 1) == size:
        shared.set(name + " met", "yes")
    shared.wait([name + " met"], timedelta(seconds=60))
    watch.mark(name + " done")

def end_wait_when_reported(name):
    "Let those who wait for a rank that does not come go on once the hang is reported."
    def tell(store):
        while not list(Path(sys.argv[1]).glob("hang-*.txt")):
            time.sleep(0.05)
        store.set(name + " met", "no")
    if rank == size - 1:
        threading.Thread(target=tell, args=(dist.PrefixStore("run", store.clone()),), daemon=True).start()

def stop_until_rank_0_has_ended():
    pids = f"{shared.get('pid').decode()}", f"{os.getpid()}"
    subprocess.Popen(["sh", "-c", "while kill -0 $0 2>/dev/null; do sleep 0.2; done; kill -9 $1", *pids])
    os.kill(os.getpid(), signal.SIGSTOP)

if rank == 0:
    shared.set("pid", str(os.getpid()))

meet("start")
"""


def in_group(body: str) -> str:
    return GROUP + body


def at_store(body: str) -> str:
    return STORE_ONLY + body


def line_of(source: str, text: str) -> str:
    """`script.py:LINE` of the one line of a script that holds `text`."""
    (number,) = [number for number, line in enumerate(source.splitlines(), 1) if text in line]
    return f"script.py:{number}"


def culprit_row(stderr: str) -> str:
    """The first marked row of the table."""
    return next(line for line in stderr.splitlines() if line.startswith(">"))


def test_a_rank_that_skips_a_gather_is_named_with_its_line(
    run_ranks_script: RunScript, tmp_path: Path
) -> None:
    source = in_group("""
other = dist.new_group()
def evaluate():
    watch.mark("evaluate")
    if rank != 1:
        gather_object(context, rank)  # the gather
    dist.barrier(group=other)  # after the gather
def rescue():
    os.read(report_pipe(), 1)
    if rank == 1:
        gather_object(context, rank)
helper = threading.Thread(target=rescue)
helper.start()
evaluate()
helper.join()
watch.mark("rescued")
leave()
""")
    ranks = run_ranks_script(source, str(tmp_path / "reports"), num_processes=3)
    said = ranks[0].stderr
    assert "likely culprit: rank 1: waits elsewhere than most" in said
    assert re.search(r"^>  1 +\d s +evaluate +(\S+) evaluate +barrier$", said, re.MULTILINE)
    assert line_of(source, "# after the gather") in culprit_row(said)
    assert re.search(
        rf"^   0, 2 .* {line_of(source, '# the gather')} evaluate +all_gather_object$", said, re.MULTILINE
    )
    assert [rank.stderr for rank in ranks[1:]] == ["", ""]
    assert [rank.returncode for rank in ranks] == [0, 0, 0]
    (path,) = (tmp_path / "reports").iterdir()
    assert f"All stacks: {path}" in said
    stacks = path.read_text()
    assert all(f"\nrank {rank} on " in "\n" + stacks for rank in range(3))
    assert "dist.barrier(group=other)  # after the gather" in stacks


@pytest.mark.slow
def test_a_rank_that_skips_a_backward_is_named(run_ranks_script: RunScript, tmp_path: Path) -> None:
    source = (
        GROUP.replace(
            "# setup",
            """
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
model(torch.ones(4, 2)).sum().backward()
""",
        )
        + """
for batch in range(3):
    loss = model(torch.ones(4, 2)).sum()
    watch.mark("batch")
    if rank == 1 and batch == 2:
        os.read(report_pipe(), 1)  # no backward
    loss.backward()
    watch.mark("backward")
leave()
"""
    )
    first, second = run_ranks_script(source, str(tmp_path))
    assert "likely culprit: rank 1: waits for no other rank, while the others wait" in first.stderr
    assert culprit_row(first.stderr).endswith(
        f"{line_of(source, '# no backward')} <module>  os.read(report_pipe(), 1)"
    )
    assert re.search(r"^   0 .*  backward$", first.stderr, re.MULTILINE)
    assert (first.returncode, second.returncode, second.stderr) == (0, 0, "")


@pytest.mark.slow
def test_a_rank_that_sleeps_in_its_dataset_is_named_and_the_run_goes_on(
    run_ranks_script: RunScript, tmp_path: Path
) -> None:
    source = in_group("""
class Text(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        if index == 2 and rank == 1:
            os.read(report_pipe(), 1)  # a slow disk
        return index
for batch in torch.utils.data.DataLoader(Text()):
    watch.mark("batch")
    step()
time.sleep(1)
leave()
""")
    first, second = run_ranks_script(source, str(tmp_path))
    assert culprit_row(first.stderr).startswith(">  1 ")
    assert line_of(source, "# a slow disk") + " Text.__getitem__" in culprit_row(first.stderr)
    assert first.stderr.count("likely culprit") == 1  # asked once, not at every look
    assert re.search(r"progress again, \d+ s after the ranks were asked: rank 0 went on with: ", first.stderr)
    assert (first.returncode, second.returncode, second.stderr) == (0, 0, "")


@pytest.mark.slow
@pytest.mark.parametrize("dead", [0, 1])
def test_silence_names_a_killed_rank_and_the_lowest_that_lives_reports(
    run_ranks_script: RunScript, tmp_path: Path, dead: int
) -> None:
    source = at_store(f"""
if rank == {dead}:
    os.kill(os.getpid(), signal.SIGKILL)
end_wait_when_reported("epoch")
meet("epoch")  # never met
watchdog.stop()
shared.add("left", 1)
while rank == size - 1 and shared.add("left", 0) < size - 1:
    time.sleep(0.05)
""")
    ranks = run_ranks_script(source, str(tmp_path), num_processes=3)
    reporter = min({0, 1, 2} - {dead})
    said = ranks[reporter].stderr
    assert f"likely culprit: rank {dead}: no answer: it was killed or stopped" in said
    assert re.search(rf"^>  {dead} +\(no answer\)$", said, re.MULTILINE)
    assert [("likely culprit" in rank.stderr) for rank in ranks].count(True) == 1
    assert ranks[dead].returncode == -9


@pytest.mark.slow
def test_a_stopped_rank_is_named_and_a_stuck_process_ends_at_the_groups_timeout(
    run_ranks_script: RunScript, tmp_path: Path
) -> None:
    source = at_store("""
if rank == 1:
    stop_until_rank_0_has_ended()
if rank == 0:
    time.sleep(60)  # not in a collective, yet held up by the same hang
meet("epoch")
""")
    ranks = run_ranks_script(source, str(tmp_path), num_processes=3, environment={"TEST_TIMEOUT": "10"})
    said = ranks[0].stderr
    assert "likely culprit: rank 1: no answer: it was killed or stopped" in said
    assert "a rank that is stuck ends 10 s after its last progress" in said
    for rank in (0, 2):
        assert ranks[rank].returncode == HANG_EXIT_CODE
        assert (
            f"drivetrain: rank {rank} ends its process (exit code 124): no progress for" in ranks[rank].stderr
        )
        assert "likely culprit: rank 1" in ranks[rank].stderr
    assert "time.sleep(60)" in said


@pytest.mark.slow
def test_a_stopped_host_of_the_store_does_not_silence_the_others(
    run_ranks_script: RunScript, tmp_path: Path
) -> None:
    source = at_store("""
if rank == 1:
    while not shared.add("epoch", 0):
        time.sleep(0.01)
    time.sleep(1)  # rank 0 has its answer too, and waits
    stop_until_rank_0_has_ended()
meet("epoch")
""")
    first, second = run_ranks_script(source, str(tmp_path), environment={"TEST_TIMEOUT": "10"})
    assert "likely culprit: whoever hosts the rendezvous store at 127.0.0.1:" in first.stderr.lower()
    assert "shared.wait(" in first.stderr
    assert (first.returncode, second.returncode) == (HANG_EXIT_CODE, -9)


@pytest.mark.slow
def test_a_rank_that_finished_or_failed_early_is_not_taken_for_dead(
    run_ranks_script: RunScript, tmp_path: Path
) -> None:
    source = at_store("""
if rank == 0:
    sys.exit()
if rank == 1:
    raise ValueError("a bad batch")
end_wait_when_reported("epoch")
meet("epoch")
""")
    ranks = run_ranks_script(source, str(tmp_path), num_processes=3)
    said = ranks[2].stderr
    assert "likely culprit: rank 1: ended by ValueError: a bad batch; rank 0: finished" in said
    assert re.search(r"^>  1 +\(ended by ValueError\)$", said, re.MULTILINE)
    assert [rank.returncode for rank in ranks] == [0, 1, 0]


@pytest.mark.slow
def test_ranks_that_work_alone_for_long_are_let_be(run_ranks_script: RunScript, tmp_path: Path) -> None:
    source = in_group("""
def tokenize():
    end = time.monotonic() + 8
    while time.monotonic() < end or not is_reported():
        time.sleep(0.1)
tokenize()
print("done")
step()
leave()
""")
    ranks = run_ranks_script(source, str(tmp_path), environment={"TEST_TIMEOUT": "4"})
    assert "no rank is stuck waiting for another, so this may just be slow" in ranks[0].stderr
    assert "tokenize" in ranks[0].stderr
    assert [(rank.returncode, rank.stdout) for rank in ranks] == [(0, "done\n")] * 2


@pytest.mark.slow
def test_nothing_is_said_when_nothing_hangs_and_the_host_of_the_store_goes_first(
    run_ranks_script: RunScript, tmp_path: Path
) -> None:
    source = in_group("""
for _ in range(50):
    step()
if rank == 1:
    time.sleep(2)  # rank 0 and its store are gone by now
""")
    ranks = run_ranks_script(source, str(tmp_path / "reports"))
    assert [(rank.returncode, rank.stderr) for rank in ranks] == [(0, "")] * 2
    assert not any((tmp_path / "reports").iterdir())


@pytest.mark.slow
def test_two_watches_of_one_process_share_the_threads_and_either_is_progress(
    run_ranks_script: RunScript, tmp_path: Path
) -> None:
    source = in_group("""
import threading
before = threading.active_count()
again = connect(settings)
assert threading.active_count() == before
for _ in range(50):
    again.progress.mark("work")
    time.sleep(0.1)
again.close()
again.close()
assert threading.active_count() == before
dist.barrier()
context.close()
assert threading.active_count() == before - 2, threading.enumerate()
""")
    ranks = run_ranks_script(source, str(tmp_path))
    assert [(rank.returncode, rank.stderr) for rank in ranks] == [(0, "")] * 2
