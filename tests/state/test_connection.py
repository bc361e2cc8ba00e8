import socket

import pytest
import torch
import torch.distributed as dist

from drivetrain_state import (
    ConnectError,
    DeviceError,
    GroupMismatchError,
    ParallelDims,
    StateSettings,
    Topology,
    connect,
    group_backend,
)

CPU = StateSettings(device="cpu", watchdog=False)


def test_one_process_without_a_launcher_has_no_group() -> None:
    with connect(device="cpu") as context:
        assert context.group is None
        assert context.mesh is None
        assert not context.owns_group
        assert not dist.is_initialized()
        assert context.topology == Topology()
        assert context.device == torch.device("cpu")


def test_a_mesh_for_one_process_brings_a_group_that_ends_with_it() -> None:
    context = connect(CPU, parallelism=ParallelDims(shard=-1))
    assert context.owns_group
    assert context.mesh is not None
    assert context.mesh.mesh_dim_names == ("shard",)
    assert context.group is dist.group.WORLD
    context.close()
    context.close()
    with pytest.raises(ConnectError, match="the process group has ended"):
        _ = context.group
    assert not dist.is_initialized()


def test_a_context_cannot_be_changed() -> None:
    with connect(CPU) as context, pytest.raises(AttributeError, match="cannot assign to field"):
        context.device = torch.device("meta")  # type: ignore[misc]


def test_the_argument_wins_over_the_settings() -> None:
    with connect(StateSettings(device="xpu"), device="cpu") as context:
        assert context.device.type == "cpu"
        assert context.settings.device == "cpu"


@pytest.mark.parametrize(
    ("device", "error", "message"),
    [
        ("mlu", DeviceError, r"device='mlu': this machine has none.*'cpu' or 'auto'"),
        ("gpu", ValueError, r"device='gpu': .*'cpu', 'cuda'"),
        ("cuda:first", DeviceError, "device='cuda:first': say a kind"),
    ],
)
def test_a_device_that_is_not_here_or_is_none_is_refused(
    device: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        connect(device=device)


def test_a_wrong_mesh_leaves_no_group_behind() -> None:
    with pytest.raises(ValueError, match="world_size=1"):
        connect(CPU, parallelism=ParallelDims(tensor=2))
    assert not dist.is_initialized()


def test_backends_by_device() -> None:
    assert group_backend("cpu") == "gloo"
    assert group_backend("cuda") == "cpu:gloo,cuda:nccl"
    with pytest.raises(ConnectError, match="device='mps' has no collectives"):
        group_backend("mps")


def _adopt() -> tuple[object, ...]:
    first, second = connect(CPU), connect(CPU)
    assert first.group is second.group is dist.group.WORLD
    assert not first.owns_group
    first.close()
    second.close()
    return dist.is_initialized(), first.topology


def test_an_existing_group_is_adopted_and_outlives_the_contexts(run_ranks) -> None:
    for rank, (alive, topology) in enumerate(run_ranks(_adopt)):
        assert alive
        assert topology == Topology(rank=rank, local_rank=rank, world_size=2, local_world_size=2)


SCRIPT = """
import sys, torch, torch.distributed as dist
from drivetrain_state import *
settings = StateSettings(device="cpu", watchdog=False, timeout_seconds=20)
"""
SHOWS_ERROR = """
try:
    connect(settings)
except ConnectError as error:
    print(error)
"""


def script(body: str) -> str:
    return SCRIPT + body


def test_a_group_that_was_made_is_owned_shared_and_ended(run_ranks_script) -> None:
    source = script("""
first = connect(settings)
second = connect(settings)
assert first.owns_group and not second.owns_group and first.group is second.group
assert reduce(second, torch.ones(1)).item() == 2
second.close()
assert dist.is_initialized()
first.close()
assert not dist.is_initialized()
try:
    reduce(second, torch.ones(1))
except ConnectError as error:
    assert "the first context or Accelerator to connect owns it and was closed; close that one last" in str(error)
else:
    raise AssertionError("a group that has ended was used")
print(first.topology.rank, first.device)
""")
    done = run_ranks_script(source)
    assert [(each.returncode, each.stdout) for each in done] == [(0, "0 cpu\n"), (0, "1 cpu\n")], done


@pytest.mark.slow
def test_a_group_that_nobody_closed_ends_with_the_process(run_ranks_script) -> None:
    source = script("""
import atexit
atexit.register(lambda: print("group after the end:", dist.is_initialized()))  # the first registered runs last
connect(settings)
""")
    done = run_ranks_script(source, fresh=True)
    assert [(each.returncode, each.stdout) for each in done] == [(0, "group after the end: False\n")] * 2, (
        done
    )


def test_a_group_made_without_a_launcher_tells_its_ranks(run_ranks_script) -> None:
    source = """
import os, sys, torch.distributed as dist
rank, port = int(os.environ["RANK"]), os.environ["MASTER_PORT"]
for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"):
    del os.environ[name]
from drivetrain_state import *
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
context = connect(StateSettings(device="cpu", watchdog=False))
print(context.topology.rank, context.topology.local_rank, context.topology.local_world_size, context.owns_group)
dist.destroy_process_group()
"""
    done = run_ranks_script(source)
    assert [each.stdout for each in done] == ["0 0 2 False\n", "1 1 2 False\n"], done


def test_a_group_of_another_size_is_refused_naming_both(run_ranks_script) -> None:
    source = script("""
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
try:
    connect(settings)
except GroupMismatchError as error:
    print(error)
""")
    for each in run_ranks_script(source):
        assert "has world size 1, but the launcher's variables say 2" in each.stdout, each


def test_a_group_without_a_backend_for_the_device_is_refused_naming_both() -> None:
    dist.init_process_group("cuda:gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(
            GroupMismatchError, match=r"needs a process group with 'cpu:gloo', but the one .* has 'cuda:gloo'"
        ):
            connect(CPU)
    finally:
        dist.destroy_process_group()


def test_a_group_with_an_unusual_backend_is_adopted_with_one_warning(run_ranks_script) -> None:
    source = script("""
def gloo(store, rank, size, timeout):
    return dist.ProcessGroupGloo(store, rank, size, timeout)
dist.Backend.register_backend("own", gloo, devices=["cpu"])
dist.init_process_group("cpu:own")
first, second = connect(settings), connect(settings)
print(first.owns_group, reduce(second, torch.tensor(2.0)).item())
dist.destroy_process_group()
""")
    first, second = run_ranks_script(source)
    assert first.stdout == second.stdout == "False 4.0\n", (first, second)
    warning = "the process group that exists moves cpu tensors through own: for gloo, create it with"
    assert first.stderr.count(warning) == 1, first
    assert warning not in second.stderr, second


def test_a_port_in_use_is_said(run_ranks_script) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        source = script(SHOWS_ERROR)
        (first,) = run_ranks_script(
            source,
            num_processes=1,
            environment={"MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"},
        )
    assert f"rank 0 cannot listen on 127.0.0.1:{port}: the port is in use" in first.stdout, first


@pytest.mark.slow
def test_ranks_that_do_not_come_are_said(run_ranks_script) -> None:
    source = script(SHOWS_ERROR).replace("timeout_seconds=20", "timeout_seconds=2")
    (first,) = run_ranks_script(
        source, num_processes=1, environment={"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    )
    assert "rank 0 waited 2 s" in first.stdout, first
    assert "and rank 1 did not come" in first.stdout, first


def test_the_watchdog_runs_while_the_context_is_open(run_ranks_script) -> None:
    source = """
import threading
from drivetrain_state import *
before = threading.active_count()
context = connect(device="cpu")
during = threading.active_count()
barrier(context)
context.close()
print(during > before, not any(type(t).__module__.startswith("drivetrain") for t in threading.enumerate()))
"""
    for each in run_ranks_script(source):
        assert each.stdout == "True True\n", each


def test_a_child_of_a_rank_cannot_be_the_rank_too(run_ranks_script) -> None:
    source = script("""
import multiprocessing, os
def child():
    try:
        connect(settings)
    except ConnectError as error:
        print(os.getppid(), error, flush=True)
if __name__ == "__main__":
    context = connect(settings)
    print(os.getpid(), flush=True)
    worker = multiprocessing.get_context("fork").Process(target=child)
    worker.start()
    worker.join()
    context.close()
    if os.fork():  # a program of its own, as far as its environment goes
        os.wait()
    else:
        child()
        os._exit(0)
""")
    for rank, done in enumerate(run_ranks_script(source)):
        pid, worker, program = done.stdout.splitlines()
        says = f"inherited RANK={rank} and WORLD_SIZE=2 from process {pid}, which is that rank"
        assert worker.startswith(f"{pid} this process (")
        assert program.startswith(f"{pid} this process (")
        assert says in worker
        assert says in program
        assert "cannot connect, so keep this call out of it" in worker
        assert "drivetrain launch --num-processes 1 SCRIPT" in program


def test_gloo_listens_on_loopback_alone_where_the_ranks_meet_there(run_ranks_script) -> None:
    source = """
import os
from drivetrain_state import *
context = connect(StateSettings(device="cpu", watchdog=False))
inside = os.environ["GLOO_SOCKET_IFNAME"]
inodes = {os.readlink(f"/proc/self/fd/{fd}")[8:-1] for fd in os.listdir("/proc/self/fd")
          if os.path.exists(f"/proc/self/fd/{fd}") or os.path.islink(f"/proc/self/fd/{fd}")}
rows = [line.split() for name in ("tcp", "tcp6") for line in open(f"/proc/net/{name}").readlines()[1:]]
listening = {row[1].rpartition(":")[0] for row in rows if row[3] == "0A" and row[9] in inodes}
barrier(context)
context.close()
print(inside, listening, os.environ.get("GLOO_SOCKET_IFNAME"))
"""
    for done in run_ranks_script(source):
        assert done.stdout == "lo {'0100007F'} None\n", done
