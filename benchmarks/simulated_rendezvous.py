"""How the rendezvous store bears many agents: joining, a barrier and a failure's news with 64, 512 and 4,096 of them.

uv run --group bench python benchmarks/simulated_rendezvous.py

Each agent is a thread with a TCPStore client of its own, torch's real one, against a TCPStore server in a process of
its own; a few forked processes hold the threads. All of them share this machine, so that the numbers are an upper
bound for a server that has its host for itself. No agent starts ranks.
"""

import argparse
import os
import statistics
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

from name_servers import leave_name_servers
from rounds import RESULTS, Table, report
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend

SIZES = (64, 512, 4096)
NUM_PROCESSES = 4
TIMEOUT = timedelta(seconds=240)
# An entry of one agent in the state of torch's c10d rendezvous: its name, its rank and its last heartbeat.
ENTRY_BYTES = 100
# After this time the agents that have not entered the shared state are counted instead.
STATE_SECONDS = 30.0
_STACK_BYTES = 512 * 1024
_FORK = get_context("fork")


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """What each agent of a process does next.

    Attributes:
        name: "join", "barrier", "news", "state" or "end".
        number: How many phases of this name there were, so that keys are new.
        size: The number of agents in all processes.
    """

    name: str
    number: int
    size: int


class AgentThread(threading.Thread):
    """A simulated agent: it takes part in the phases that its process is told, and notes when each ended."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self._port = port
        self._store: TCPStore | None = None
        self.phase: Phase | None = None
        self.begin = threading.Semaphore(0)
        self.ended = threading.Semaphore(0)
        self.end_seconds = 0.0

    def run(self) -> None:
        """Take part until the phase "end"."""
        while True:
            self.begin.acquire()
            assert self.phase is not None
            if self.phase.name == "end":
                return
            self._take_part(self.phase)
            self.ended.release()

    def _take_part(self, phase: Phase) -> None:
        if phase.name == "join":
            self._store = TCPStore(
                "127.0.0.1", self._port, is_master=False, wait_for_workers=False, timeout=TIMEOUT
            )
        assert self._store is not None
        if phase.name in ("join", "barrier"):
            key = f"{phase.name}/{phase.number}"
            if self._store.add(key, 1) == phase.size:
                self._store.set(f"{key}/all", "")
            self._store.wait([f"{key}/all"], TIMEOUT)
        elif phase.name == "news":
            self._store.add(f"listening/{phase.number}", 1)
            self._store.wait([f"news/{phase.number}"], TIMEOUT)
            self._store.get(f"news/{phase.number}")
        elif phase.name == "state":
            _enter_state(self._store, phase)
        self.end_seconds = time.monotonic()


def _enter_state(store: TCPStore, phase: Phase) -> None:
    """Enter the one value that torch's c10d rendezvous keeps, by compare and swap, as each of its agents does."""
    backend = C10dRendezvousBackend(store, f"run{phase.number}")
    found = backend.get_state()
    state, token = found if found is not None else (b"", None)
    deadline = time.monotonic() + STATE_SECONDS
    while time.monotonic() < deadline:
        answer = backend.set_state(state + b"x" * ENTRY_BYTES, token)
        assert answer is not None
        state, token, has_set = answer
        if has_set:
            store.add(f"entered/{phase.number}", 1)
            return


def hold_agents(commands: Connection, port: int, count: int) -> None:
    """Run the agents of one process: hand each phase to all, and answer with the times at which they ended."""
    _hush()
    threading.stack_size(_STACK_BYTES)
    agents = [AgentThread(port) for _ in range(count)]
    for agent in agents:
        agent.start()
    while True:
        phase: Phase = commands.recv()
        for agent in agents:
            agent.phase = phase
        for agent in agents:
            agent.begin.release()
        if phase.name == "end":
            break
        for agent in agents:
            agent.ended.acquire()
        commands.send([agent.end_seconds for agent in agents])
    commands.close()
    os._exit(0)  # the clients' sockets close with the process


def serve(answers: Connection) -> None:
    """Host the store until the other side is closed."""
    _hush()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
    answers.send(store.port)
    try:
        answers.recv()
    except EOFError:
        os._exit(0)


def _hush() -> None:
    """Drop what torch says of each connection whose address has no name."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


class Cluster:
    """A store and agents in processes of their own."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._number = 0
        self._server, server_end = _FORK.Pipe()
        self._processes = [_FORK.Process(target=serve, args=(server_end,), daemon=True)]
        self._processes[0].start()
        server_end.close()
        self.port: int = self._server.recv()
        self._agents: list[Connection] = []
        for index in range(NUM_PROCESSES):
            mine, theirs = _FORK.Pipe()
            count = size // NUM_PROCESSES + (index < size % NUM_PROCESSES)
            process = _FORK.Process(target=hold_agents, args=(theirs, self.port, count), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._agents.append(mine)
        self.store: TCPStore | None = None  # made after the forks, since it may start threads

    def run(self, name: str) -> float:
        """Have all agents take part in a phase; return the seconds until the last one has ended it."""
        self._number += 1
        phase = Phase(name=name, number=self._number, size=self._size)
        begin = time.monotonic()
        for agents in self._agents:
            agents.send(phase)
        if name == "news":
            begin = self._tell(phase)
        return max(max(agents.recv()) for agents in self._agents) - begin

    def entered(self) -> int:
        """Return how many agents entered the shared state in the last phase."""
        return self._client().add(f"entered/{self._number}", 0)

    def close(self) -> None:
        """End all processes."""
        for agents in self._agents:
            agents.send(Phase(name="end", number=0, size=self._size))
        self.store = None
        for process in self._processes[1:]:
            process.join(60)
        self._server.close()
        for process in self._processes:
            process.kill()
            process.join(60)

    def _client(self) -> TCPStore:
        if self.store is None:
            self.store = TCPStore(
                "127.0.0.1", self.port, is_master=False, wait_for_workers=False, timeout=TIMEOUT
            )
        return self.store

    def _tell(self, phase: Phase) -> float:
        """Write the news once every agent listens; return when."""
        store = self._client()
        while store.add(f"listening/{phase.number}", 0) < self._size:
            time.sleep(0.02)
        time.sleep(0.5)  # the last one has counted itself, but may not wait yet
        begin = time.monotonic()
        store.set(f"news/{phase.number}", "rank 7 failed")
        return begin


def measure_joining(size: int, rounds: int) -> list[float]:
    """Measure joining alone, as names are looked up on this machine."""
    seconds: list[float] = []
    for number in range(rounds):
        cluster = Cluster(size)
        try:
            seconds.append(cluster.run("join"))
        finally:
            cluster.close()
        print(
            f"round {number}: {size} agents: {seconds[-1]:.3g} s with name servers",
            file=sys.stderr,
            flush=True,
        )
    return seconds


PHASES = ("join", "barrier", "news", "state")


def measure(size: int) -> tuple[dict[str, float], str]:
    """Measure all phases once; return seconds by phase, and a remark if not all agents got through."""
    cluster = Cluster(size)
    try:
        taken = {name: cluster.run(name) for name in PHASES}
        entered = cluster.entered()
    finally:
        cluster.close()
    told = ", ".join(f"{name} {value:.3g} s" for name, value in taken.items())
    print(f"{size} agents: {told}", file=sys.stderr, flush=True)
    if entered == size:
        return taken, ""
    return taken, f"in a round, {entered:,} of {size:,} agents had entered after {STATE_SECONDS:g} s"


def tables(found: Mapping[int, Mapping[str, list[float]]]) -> list[Table]:
    """Return a table for each phase, with a row for each number of agents."""
    titles = {
        "join": "Joining: connect, count oneself, wait for all",
        "barrier": "A barrier of agents that are connected",
        "news": "A failure's news: one key is set, until the last waiting agent has read it",
        "state": "Entering the shared state of torch's c10d rendezvous (one value, compare and swap)",
    }
    return [
        Table(
            title=title,
            unit="ms",
            measured={f"{size:,} agents": seconds[name] for size, seconds in found.items()},
        )
        for name, title in titles.items()
    ]


def meaning(found: Mapping[int, Mapping[str, list[float]]], remarks: list[str], names: str) -> str:
    """Return what the numbers say about a cluster, in words, with the numbers of this run."""
    most = max(found)
    each = {name: statistics.median(found[most][name]) / most * 1e6 for name in ("join", "barrier", "news")}
    news_seconds = statistics.median(found[most]["news"])
    sizes = sorted(found)
    growth = statistics.median(found[most]["state"]) / statistics.median(found[sizes[0]]["state"])
    heartbeat_megabytes = most * most * ENTRY_BYTES / 5 / 1e6
    return (
        f"An agent is a thread with torch's own TCPStore client, in {NUM_PROCESSES} processes; agents and "
        "server share "
        "the cores of this machine, so read the times as upper bounds. It stands for a host with drivetrain launch, "
        f"and for a rank where ranks meet at the store themselves. {names}\n\n"
        "**What it says about a cluster.** One server answers one request after another, so all times grow with the "
        f"number of agents: at {most:,}, joining takes {each['join']:.0f} us for each, a barrier "
        f"{each['barrier']:.0f} "
        f"us, a failure's news {each['news']:.0f} us. The news reaches all {most:,} in {news_seconds:.2g} s, "
        "since all "
        "wait on one key and nobody asks again and again: the store is no reason to restart slowly. Joining is what "
        "hurts: it takes seconds beyond about a thousand agents, less by the store than by what surrounds it. "
        "Every client is an open file of the store's host: raise `ulimit -n` "
        "there above three times the number of ranks. All arrive at once: raise `net.core.somaxconn` above the "
        "number "
        "of clients, else connections are dropped and tried again after a second. And torch looks up the name of "
        "every connection's other end: with a name server that drops bursts, joining takes tens of seconds (last "
        "table), whatever the store does; put the hosts into /etc/hosts, or run a caching name server on the store's "
        "host; `drivetrain doctor` times this lookup. Give `--rdzv-timeout-seconds` some seconds for each thousand "
        "agents.\n\n"
        f"`--rdzv-backend c10d` keeps one value with an entry of each agent ({ENTRY_BYTES} bytes here), which each "
        "agent rewrites as it joins: the bytes grow with the square, and who loses the race tries again with what it "
        f"reads. From {sizes[0]:,} to {most:,} agents its time grew {growth:.0f}-fold "
        f"here{': ' if remarks else ''}{'; '.join(remarks)}. Its agents also rewrite the value with a heartbeat "
        "every "
        f"5 s: computed, {heartbeat_megabytes:,.0f} MB/s at {most:,} agents before any race, which one server that "
        "shares its host with ranks should not carry. It suits tens to a few hundred hosts that come and go; "
        "more are "
        "better placed with `--rdzv-backend static`, or by a cluster that states the ranks."
    )


def main() -> None:
    """Measure every number of agents in turn."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count, after one that does not")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder the table is written to")
    parser.add_argument("--most", type=int, default=SIZES[-1], help="leave out larger numbers of agents")
    arguments = parser.parse_args()
    sizes = [size for size in SIZES if size <= arguments.most]
    # Before the name servers are left, for good.
    with_servers = {f"{size:,} agents": measure_joining(size, min(2, arguments.rounds)) for size in sizes[:2]}
    names = (
        "No name server is asked but in the last table."
        if leave_name_servers()
        else "Names are looked up as this machine does, since only root can leave its name servers out."
    )
    found = {size: {name: list[float]() for name in PHASES} for size in sizes}
    remarks: list[str] = []
    for number in range(1 + arguments.rounds):
        for size in sizes:
            taken, remark = measure(size)
            remarks += [remark] if remark else []
            for name, value in taken.items() if number else ():
                found[size][name].append(value)
    asked = Table(title="Joining, with this machine's name server asked", unit="ms", measured=with_servers)
    note = meaning(found, remarks, names)
    report("simulated_rendezvous", [*tables(found), asked], arguments, note=note)


if __name__ == "__main__":
    main()
