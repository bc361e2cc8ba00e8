"""How an elastic run bears many nodes: a round begins, nodes beat, one leaves, the others begin the next round.

uv run --group bench python benchmarks/simulated_elastic.py

Each node is the launcher's own rendezvous handler with its threads, as `drivetrain launch --nnodes 1:N` uses it. The
leader has a process of its own; four forked ones hold the others. No node starts ranks. All of them share this
machine, so that the numbers are an upper bound for a leader that has its host for itself.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

from name_servers import leave_name_servers
from rounds import RESULTS, Table, report

from drivetrain_launcher.membership.decision import Limits
from drivetrain_launcher.membership.handler import ElasticMeeting, ElasticNodes
from drivetrain_launcher.membership.member import RunOverError

SIZES = (16, 64, 512)
NUM_PROCESSES = 4
# Five times the launcher's default, since all nodes share the cores of this machine. They beat as often as with 6 s.
SILENCE_SECONDS = 30.0
BEAT_SECONDS = 5.0
TITLES = {
    "begin": ("s", "All nodes come: until the last has its rank in the first round"),
    "beats": ("s", "Seconds of processor time that the leader's process takes in a second of the run"),
    "news": ("s", "A node leaves: until the last of the others knows"),
    "next": ("s", "The others begin the next round: until the last has its rank"),
}
_FORK = get_context("fork")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What the nodes of a process do next: "meet", "leave", "notice", "time" or "end"."""

    name: str
    seconds: float = 0.0


def hold_nodes(commands: Connection, meeting: ElasticMeeting, count: int) -> None:
    """Run the nodes of one process: hand each step to all, and answer with when the last ended it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    nodes = [ElasticNodes(meeting) for _ in range(count)]
    steps: dict[str, Callable[[ElasticNodes], object]] = {
        "meet": ElasticNodes.next_rendezvous,
        "notice": _notice,
    }
    with ThreadPoolExecutor(count) as pool:
        while (step := commands.recv()).name != "end":
            if step.name == "leave":
                nodes.pop().leave("stopped")
            elif step.name == "time":
                before = time.process_time()
                time.sleep(step.seconds)
                commands.send((time.process_time() - before) / step.seconds)
                continue
            else:
                errors = [error for error in pool.map(partial(_tried, steps[step.name]), nodes) if error]
                if errors:
                    commands.send(errors[0])
                    break
            commands.send(time.monotonic())
        os._exit(0)


def _tried(step: Callable[[ElasticNodes], object], node: ElasticNodes) -> str:
    """Take a step; return the error that ended the run for this node, or nothing."""
    try:
        step(node)
    except RunOverError as error:
        return str(error)
    return ""


def _notice(node: ElasticNodes) -> None:
    while not node.num_nodes_waiting():
        node.wait_for_change(1.0)
        node.check()


class Run:
    """An elastic run of so many nodes, in processes of their own; the first has the leader."""

    def __init__(self, size: int, port: int) -> None:
        limits = Limits(
            min_nodes=1,
            max_nodes=size,
            silence_seconds=SILENCE_SECONDS,
            gather_seconds=60.0,
            wait_seconds=120.0,
        )
        meeting = ElasticMeeting(address="127.0.0.1", port=port, run_id="many", processes=1, limits=limits)
        rest = [
            (size - 1) // NUM_PROCESSES + (index < (size - 1) % NUM_PROCESSES)
            for index in range(NUM_PROCESSES)
        ]
        self._holders: list[Connection] = []
        self._processes = []
        for count in (1, *rest):
            mine, theirs = _FORK.Pipe()
            process = _FORK.Process(target=hold_nodes, args=(theirs, meeting, count), daemon=True)
            process.start()
            theirs.close()
            self._holders.append(mine)
            self._processes.append(process)

    def measure(self) -> dict[str, float]:
        """Play all that is measured once; return seconds by name."""
        everyone = self._holders
        everyone[0].send(Step(name="meet"))
        time.sleep(1.0)  # whoever comes first leads
        began = time.monotonic()
        found = {"begin": self._all(everyone[1:], "meet") - began}
        everyone[0].recv()
        everyone[0].send(Step(name="time", seconds=BEAT_SECONDS))
        found["beats"] = everyone[0].recv()
        left = self._all(everyone[-1:], "leave")
        found["news"] = self._all(everyone, "notice") - left
        began = time.monotonic()
        found["next"] = self._all(everyone, "meet") - began
        return found

    def close(self) -> None:
        """End all processes."""
        for process in self._processes:
            process.kill()
            process.join(60)

    def _all(self, holders: Sequence[Connection], name: str) -> float:
        for holder in holders:
            holder.send(Step(name=name))
        answers = [holder.recv() for holder in holders]
        if errors := [answer for answer in answers if isinstance(answer, str)]:
            raise SystemExit(f"a node gave up, since this machine is too slow for so many: {errors[0]}")
        return max(answers)


def main() -> None:
    """Measure every number of nodes in turn."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="rounds that count, after one that does not")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder the table is written to")
    parser.add_argument("--most", type=int, default=SIZES[-1], help="leave out larger numbers of nodes")
    arguments = parser.parse_args()
    sizes = [size for size in SIZES if size <= arguments.most]
    names = (
        "No name server is asked: torch looks up the name of each connection's other end, and a name server that "
        "drops bursts adds seconds to the first round."
        if leave_name_servers()
        else "Names are looked up as this machine does, since only root can leave its name servers out."
    )
    found = {name: {f"{size:,} nodes": list[float]() for size in sizes} for name in TITLES}
    for number in range(1 + arguments.rounds):
        for size in sizes:
            run = Run(size, port=29_700 + (number * len(sizes) + sizes.index(size)) % 200)
            try:
                taken = run.measure()
            finally:
                run.close()
            told = ", ".join(f"{name} {value:.3g} s" for name, value in taken.items())
            print(f"round {number}: {size} nodes: {told}", file=sys.stderr, flush=True)
            for name, value in taken.items() if number else ():
                found[name][f"{size:,} nodes"].append(value)
    tables = [Table(title=title, unit=unit, measured=found[name]) for name, (unit, title) in TITLES.items()]
    report("simulated_elastic", tables, arguments, note=names)


if __name__ == "__main__":
    main()
