"""Each private name of torch's agent is what the launcher relies on: these tests tell when torch changes one."""

import json
import subprocess
from pathlib import Path

import pytest

# A rank that fails once, then ends well, under torch's own agent with its overridden methods noted.
RUN = """
import json, sys
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from drivetrain_launcher import compat
from drivetrain_launcher.membership.rendezvous import OneNode

forgoes = sys.argv[2] == "forgo"
seen = {"calls": [], "remaining": [], "codes": []}

class Noting(LocalElasticAgent):
    pass

def noted(name):
    def call(self, *args, **kwargs):
        if name not in seen["calls"][-1:]:
            seen["calls"].append(name)
        result = getattr(super(Noting, self), name)(*args, **kwargs)
        if name == "_monitor_workers" and result.is_failed():
            seen["remaining"].append(compat.remaining_restarts(self))
            if forgoes:
                compat.forgo_restarts(self)
        if name == "_shutdown" and seen["codes"][-1:] != [codes := compat.exit_codes(self)]:
            seen["codes"].append(codes)
        return result
    return call

for name in compat.OVERRIDDEN:
    setattr(Noting, name, noted(name))
rank = "import pathlib, sys; mark = pathlib.Path(sys.argv[1]); had = mark.exists(); mark.touch(); sys.exit(not had)"
spec = WorkerSpec(
    role="default", local_world_size=1, rdzv_handler=OneNode("127.0.0.1", 0, "run"), entrypoint=sys.executable,
    args=("-c", rank, sys.argv[1]), max_restarts=1, monitor_interval=0.05,
)
agent = Noting(spec, logs_specs=DefaultLogsSpecs())
agent.run()
seen["remaining"].append(compat.remaining_restarts(agent))
agent._shutdown(15, *[5] * compat.HAS_SHUTDOWN_TIMEOUT)  # what has ended is stopped again without an error
print(json.dumps(seen))
"""


def output_of(python: str, source: str, *arguments: str) -> str:
    """Run a program to its end, and return its output."""
    finished = subprocess.run(
        [python, "-c", source, *arguments],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=120,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


ATTEMPT = ["_rendezvous", "_start_workers", "_monitor_workers", "_shutdown"]


@pytest.mark.parametrize(
    ("restarts", "calls", "remaining", "codes"),
    [("take", [*ATTEMPT, *ATTEMPT], [1, 0], [1, 0]), ("forgo", ATTEMPT, [1, 0], [1])],
)
@pytest.mark.slow
def test_the_agent_calls_what_is_overridden_and_tells_exit_codes_and_restarts(
    python: str, tmp_path: Path, restarts: str, calls: list[str], remaining: list[int], codes: list[int]
) -> None:
    seen = json.loads(output_of(python, RUN, str(tmp_path / "failed"), restarts))
    assert seen["calls"] == calls
    assert seen["remaining"] == remaining
    assert seen["codes"] == [[code] for code in codes]


STARTS = """
import json, sys
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std, start_processes
from drivetrain_launcher import compat

seen = []

def start(local_rank, environment, outputs, start_fresh):
    seen.append([local_rank, environment["RANK"], [file is not None for file in outputs]])
    return start_fresh()

def run():
    specs = DefaultLogsSpecs(log_dir=sys.argv[1], redirects={0: Std.NONE, 1: Std.OUT})
    code = "import os; print('rank', os.environ['RANK'])"
    args, envs = {0: ("-c", code), 1: ("-c", code)}, {0: {"RANK": "4"}, 1: {"RANK": "5"}}
    context = start_processes("ranks", sys.executable, args, envs, specs)
    assert not context.wait().is_failed()
    return context.pids()

with compat.ranks_started_by(start):
    run()
run()  # torch's own way again
print(json.dumps(seen))
"""


@pytest.mark.slow
def test_ranks_are_started_by_a_function_within_the_block_alone(python: str, tmp_path: Path) -> None:
    *written, seen = output_of(python, STARTS, str(tmp_path)).splitlines()
    assert json.loads(seen) == [[0, "4", [False, False]], [1, "5", [True, False]]]
    assert written == ["rank 4", "rank 4"]


MEETS = """
import socket
from datetime import timedelta
from torch.distributed import HashStore
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler
from drivetrain_launcher import compat
from drivetrain_state.store_server import host_store

store = HashStore()
parameters = RendezvousParameters(
    "c10d", "", "run", min_nodes=1, max_nodes=1, local_addr="127.0.0.1", last_call_timeout=1
)
handler = create_handler(store, C10dRendezvousBackend(store, "run"), parameters)
asked = []
def host(address):
    asked.append(address)
    return host_store("127.0.0.1", 0, timeout=timedelta(seconds=20), is_one_node=True)
compat.host_ranks_store_by(handler, host)
place = handler.next_rendezvous().bootstrap_store_info
with socket.socket() as probe:
    print(asked, probe.connect_ex(("127.0.0.1", place.master_port)), end=" ")
with socket.socket() as probe:
    print(probe.connect_ex(("127.0.0.2", place.master_port)) != 0)
handler.shutdown()
"""


def test_the_store_of_the_ranks_is_hosted_by_a_function(python: str) -> None:
    *address, reached, is_refused = output_of(python, MEETS).split()
    assert (len(address), reached, is_refused) == (1, "0", "True")
