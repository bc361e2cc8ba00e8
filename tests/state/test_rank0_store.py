from pathlib import Path

import torch.distributed as dist

from drivetrain_state import StateSettings, connect, control_store

OUTLIVES = """
import os, signal, subprocess, sys
import torch.distributed as dist
from drivetrain_state import connect, control_store
from drivetrain_state.compat import default_store
from drivetrain_state.store_rounds import underlying_store

context = connect(device="cpu")
store = control_store(context, "test")
store.set(f"rank{context.topology.rank}", "here")
for rank in range(2):
    assert store.get(f"rank{rank}") == b"here"
own, rendezvous = underlying_store(store), underlying_store(default_store())
print(own.port != rendezvous.port)
again = control_store(context, "test")
print(underlying_store(again).port == own.port, again.get("rank0") == b"here")
dist.barrier()
"""


def test_ranks_share_a_store_that_is_not_the_rendezvous(run_ranks_script) -> None:
    for rank in run_ranks_script(OUTLIVES):
        assert rank.stdout.split() == ["True", "True", "True"], rank


def test_a_single_process_has_none() -> None:
    assert control_store(connect(StateSettings(device="cpu")), "test") is None


WITHOUT_A_SERVER = """
import os, sys
import torch.distributed as dist
from torch.distributed import FileStore, TCPStore
from drivetrain_state import connect, control_store
from drivetrain_state.rank0_store import control_ports
from drivetrain_state.store_rounds import underlying_store

rank = int(os.environ["RANK"])
dist.init_process_group("gloo", store=FileStore(sys.argv[1], 2), rank=rank, world_size=2)
context = connect(device="cpu")
control = control_store(context, "test")
control.set(f"rank{rank}", "here")
print(isinstance(underlying_store(control), TCPStore), control_ports(context), control.get(f"rank{1 - rank}"))
dist.barrier()
"""


def test_ranks_of_a_group_without_a_server_share_its_store(run_ranks_script, tmp_path: Path) -> None:
    for rank in run_ranks_script(WITHOUT_A_SERVER, str(tmp_path / "store")):
        assert rank.stdout.split() == ["False", "set()", "b'here'"], rank


def hosts_a_store_for_each_context() -> list[bool]:
    found: list[bool] = []
    for number in range(2):
        context = connect(StateSettings(device="cpu"))  # rank 0's holds the server
        control = control_store(context, "test")
        assert control is not None
        found.append(control.check(["key"]))
        dist.barrier()
        control.set("key", str(number))
        dist.barrier()
    return found


def test_contexts_that_follow_each_other_have_stores_of_their_own(run_ranks) -> None:
    assert run_ranks(hosts_a_store_for_each_context) == [[False, False]] * 2
