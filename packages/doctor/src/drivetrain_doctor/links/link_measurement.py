"""The order to a program that measures pairs, the rounds of pairs, and the program as its parent sees it."""

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import IO, Any

from drivetrain_doctor.links.link_faults import Link
from drivetrain_doctor.links.link_results import GroupResult, PairResult

# The time in which the program has imported torch at the latest, on a machine with ten times more to do than cores.
_START_SECONDS = 100.0
# More than all pairs of eight ranks.
MOST_ROUNDS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class PairOrder:
    """An order to measure a group of ranks in pairs; `ranks` are the ranks that one program runs, each as a process.

    Ranks of one host meet over the file `store_path`, ranks of several hosts at a store's address. The program ends
    after `limit_seconds` at the latest.
    """

    backend: str
    world_size: int
    ranks: Sequence[int]
    store_path: str = ""
    store_host: str = ""
    store_port: int = 0
    limit_seconds: float = 20.0


def pair_rounds(
    count: int, *, most_rounds: int = MOST_ROUNDS, at_once: bool = True
) -> tuple[tuple[Link, ...], ...]:
    """Return rounds of pairs, lower rank first; within a round, no rank is in two pairs.

    With an even number of ranks, `count - 1` rounds hold every pair once (the circle method of tournaments). At most
    `most_rounds` of these rounds are returned, evenly spread. Without `at_once`, a round is a single pair.
    """
    places = count + count % 2  # with an odd number, who meets the last place pauses
    num_rounds = places - 1 if count > 1 else 0
    numbers = range(num_rounds)
    if at_once and num_rounds > most_rounds:
        numbers = [index * num_rounds // most_rounds for index in range(most_rounds)]
    rounds: list[tuple[Link, ...]] = []
    for number in numbers:
        turning = places - 1
        pairs = [(number, turning)]
        pairs += [((number + step) % turning, (number - step) % turning) for step in range(1, places // 2)]
        rounds.append(tuple(sorted((min(pair), max(pair)) for pair in pairs if max(pair) < count)))
    if at_once:
        return tuple(rounds)
    return tuple((pair,) for pairs in rounds for pair in pairs)[:most_rounds]


def start_pairs(environment: Mapping[str, str]) -> "PairProgram":
    """Start the program that measures pairs; it imports torch while other checks run, and waits for its order."""
    process = subprocess.Popen(
        [sys.executable, "-m", "drivetrain_doctor.links.link_worker"],
        env={**environment, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    return PairProgram(process)


class PairProgram:
    """A program that measures the pairs of one group. Close it even if it got no order.

    Its process leads a process group with the ranks.
    """

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process
        self._is_ready = False
        self.pid = process.pid

    def __enter__(self) -> "PairProgram":
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()

    def wait_until_ready(self) -> bool:
        """Wait until the program has imported torch, which is slow on a busy machine; return False on failure."""
        if not self._is_ready:
            assert self._process.stdout is not None
            self._is_ready = bool(_read(self._process.stdout, _START_SECONDS, lines=1))
        return self._is_ready

    def measure(self, order: PairOrder) -> GroupResult:
        """Hand the order to the program, wait until the program ends or its time is over, and return its results."""
        self.wait_until_ready()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):  # it has ended already: its events are missing
            self._process.stdin.write(json.dumps(asdict(order)).encode())
            self._process.stdin.close()
        lines = _read(self._process.stdout, order.limit_seconds)
        return result_of(order, [json.loads(line) for line in lines if line.startswith(b"{")])


def result_of(order: PairOrder, events: list[dict[str, Any]]) -> GroupResult:
    """Return the result from a program's events: "joined", "begin" (of a pair), "pair" and "failure"."""
    pairs: dict[Link, PairResult] = {}
    begun: set[Link] = set()
    joined: dict[int, float] = {}
    failures: dict[int, str] = {}
    for event in events:
        match event:
            case {"event": "pair", "first": first, "second": second, **values}:
                pairs[first, second] = PairResult(first=first, second=second, **values)
            case {"event": "begin", "first": first, "second": second}:
                begun.add((first, second))
            case {"event": "joined", "rank": rank, "seconds": seconds}:
                joined[rank] = seconds
            case {"rank": rank, "text": text}:
                failures[rank] = str(text)
            case _:  # "ready"
                pass
    for rank in sorted(set(order.ranks) - joined.keys() - failures.keys()):
        failures[rank] = f"did not join the group within {order.limit_seconds:g} s"
    return GroupResult(
        backend=order.backend,
        pairs=tuple(pairs.values()),
        unfinished=() if failures else tuple(sorted(begun - pairs.keys())),
        failures=failures,
        start_seconds=max(joined.values()) if joined and not failures else None,
    )


def _read(pipe: IO[bytes], limit_seconds: float, *, lines: int | None = None) -> list[bytes]:
    """Return the lines of a pipe until its end, until `lines` lines are read, or until the time is over."""
    text = b""
    deadline = time.monotonic() + limit_seconds
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while (left := deadline - time.monotonic()) > 0 and selector.select(left):
            part = os.read(pipe.fileno(), 1 << 16)
            text += part
            if not part or (lines is not None and text.count(b"\n") >= lines):
                break
    return text.splitlines()
