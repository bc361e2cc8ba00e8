"""Measure pairs of ranks: `python -m drivetrain_doctor.links.link_worker`, with an order on stdin.

One process imports torch and then forks a process for each rank, before any thread is started, so that eight ranks
cost one import. Each rank writes events as lines of JSON to the common stdout.
"""

import json
import os
import signal
import sys
import time
from dataclasses import asdict
from datetime import timedelta
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist

from drivetrain_doctor.links.link_measurement import PairOrder, pair_rounds
from drivetrain_doctor.links.link_results import PairResult

_PINGS, _FEWEST_PINGS = 20, 4
# After this time a pair measures with what it has: on a busy machine a message takes a hundred times longer.
_PATIENCE_SECONDS = 0.5
_FIRST_BYTES = 256 << 10
_MOST_BYTES = 64 << 20
# A message that takes so long is long enough to measure a bandwidth.
_LONG_SECONDS = 0.02


class Step(IntEnum):
    """A step in measuring a pair, which the lower rank sends to the other rank."""

    BEGIN = 0
    PING = 1
    FORWARD = 2
    BACKWARD = 3
    END = 4


def main() -> int:
    """Read the order from stdin and run its ranks; each rank ends by itself."""
    _tell(event="ready")
    order = PairOrder(**json.loads(sys.stdin.read()))
    children: list[int] = []
    for local_rank, rank in enumerate(order.ranks):
        child = os.fork()
        if not child:
            signal.setitimer(signal.ITIMER_REAL, order.limit_seconds)  # its default action ends the process
            try:
                _measure_all(order, rank, local_rank)
            except (RuntimeError, OSError, ValueError) as failure:  # torch's network errors are RuntimeErrors
                _tell(event="failure", rank=rank, text=str(failure).strip().partition("\n")[0][:300])
                os._exit(1)
            os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    return 0


def _measure_all(order: PairOrder, rank: int, local_rank: int) -> None:
    begin = time.monotonic()
    timeout = timedelta(seconds=order.limit_seconds)
    store = (
        dist.FileStore(order.store_path, order.world_size)
        if order.store_path
        else dist.TCPStore(order.store_host, order.store_port, wait_for_workers=False, timeout=timeout)
    )
    device = torch.device("cpu")
    if order.backend == "nccl":
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    dist.init_process_group(
        order.backend,
        store=dist.PrefixStore(f"doctor/{order.backend}", store),
        rank=rank,
        world_size=order.world_size,
        timeout=timeout,
    )
    dist.all_reduce(torch.ones(1, device=device))  # connects, where a backend does so late
    _tell(event="joined", rank=rank, seconds=time.monotonic() - begin)
    # Ranks of one host share its memory and cores.
    for pairs in pair_rounds(order.world_size, at_once=not order.store_path):
        for first, second in pairs:
            if rank == first:
                _tell(event="begin", first=first, second=second)
                _tell(event="pair", **asdict(_drive(first, second, device)))
            elif rank == second:
                _follow(first, device)
    # All must be there until the last pair is done: gloo's connections end with a process.
    dist.all_reduce(torch.ones(1, device=device))
    _wait(device)


def _drive(rank: int, peer: int, device: torch.device) -> PairResult:
    """Measure a pair from its lower rank, and send the other rank each step first."""

    def time_message(*, is_forward: bool) -> float:
        body = torch.zeros(size, dtype=torch.uint8, device=device)
        _wait(device)
        if is_forward:  # the message, and its answer
            _send_step(Step.FORWARD, peer, device, size)
            begin = time.perf_counter()
            dist.send(body, peer)
            _receive(torch.empty(1, dtype=torch.uint8, device=device), peer)
        else:  # the step, and its message
            begin = time.perf_counter()
            _send_step(Step.BACKWARD, peer, device, size)
            _receive(body, peer)
        return time.perf_counter() - begin

    _send_step(Step.BEGIN, peer, device)
    started = time.perf_counter()
    pings: list[float] = []
    while len(pings) < _PINGS and (
        len(pings) < _FEWEST_PINGS or time.perf_counter() - started < _PATIENCE_SECONDS
    ):
        begin = time.perf_counter()
        _send_step(Step.PING, peer, device)
        _receive(torch.empty(1, dtype=torch.uint8, device=device), peer)
        pings.append(time.perf_counter() - begin)
    latency = sorted(pings)[len(pings) // 4] / 2
    size = _FIRST_BYTES
    while True:
        forward, backward = (
            min(time_message(is_forward=is_forward) for _ in range(2)) for is_forward in (True, False)
        )
        is_long = min(forward, backward) > _LONG_SECONDS + 2 * latency
        if is_long or size >= _MOST_BYTES or time.perf_counter() - started > 2 * _PATIENCE_SECONDS:
            break
        size *= 4
    _send_step(Step.END, peer, device)
    return PairResult(
        first=rank,
        second=peer,
        latency_seconds=latency,
        # A message comes with one there or back, the step or the answer.
        forward_bytes_per_second=size / max(forward - latency, 1e-9),
        backward_bytes_per_second=size / max(backward - latency, 1e-9),
    )


def _follow(peer: int, device: torch.device) -> None:
    """Follow the steps that the lower rank of a pair sends, until the last step."""
    answer = torch.zeros(1, dtype=torch.uint8, device=device)
    while True:
        received = torch.zeros(2, dtype=torch.int64, device=device)
        _receive(received, peer)
        step, size = (int(each) for each in received.tolist())
        if step == Step.END:
            return
        if step == Step.PING:
            dist.send(answer, peer)
        elif step == Step.FORWARD:
            _receive(torch.empty(size, dtype=torch.uint8, device=device), peer)
            dist.send(answer, peer)
        elif step == Step.BACKWARD:
            dist.send(torch.zeros(size, dtype=torch.uint8, device=device), peer)
        _wait(device)


def _send_step(step: Step, peer: int, device: torch.device, size: int = 0) -> None:
    dist.send(torch.tensor([step, size], device=device), peer)


def _receive(tensor: torch.Tensor, peer: int) -> None:
    dist.recv(tensor, peer)
    _wait(tensor.device)


def _wait(device: torch.device) -> None:
    """Wait until a GPU has sent or received, since a call on a GPU only begins the transfer."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _tell(**event: Any) -> None:
    """Write an event as one line in one call, so that the lines of ranks do not mix."""
    os.write(sys.stdout.fileno(), f"{json.dumps(event)}\n".encode())


if __name__ == "__main__":
    sys.exit(main())
