"""A start of a job on Ray: all its nodes, from their placement to their end."""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from threading import Event
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from drivetrain_clusters.errors import ClusterError
from drivetrain_clusters.protocol import RESUME_EXIT_CODE
from drivetrain_clusters.ray.job import RayJob
from drivetrain_clusters.ray.node import Node
from drivetrain_clusters.ray.placement import ray_variables
from drivetrain_messages import say

# The exit code of a launcher that SIGTERM ended without a save.
_STOPPED_EXIT_CODE = 128 + 15
_POLL_SECONDS = 0.5
_TELL_SECONDS = 30.0
# The time in which Ray notices that a node is lost, also if the others failed of it before; and, after the time to
# save, that in which a launcher ends.
_MARGIN_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptEnd:
    """The end of a start: the outcome of the first failed or lost node, and whether ranks ask for a restart."""

    exit_code: int
    lost: str = ""
    has_saved: bool = False


class Attempt:
    """The nodes of one start of a job, after `number` earlier starts. Once `cancelled`, nodes are told to save."""

    def __init__(self, job: RayJob, number: int, write: Callable[[str], None], cancelled: Event) -> None:
        self._job, self._request = job, job.request
        self._number = number
        self._write = write
        self._cancelled = cancelled
        self._group: Any = None
        self._nodes: list[Any] = []
        # The output that each node still yields, and its text behind the last end of a line.
        self._streams: dict[int, Any] = {}
        self._partial: dict[int, str] = {}
        self._codes: dict[int, int] = {}
        self._lost = ""
        self._stop_at = float("inf")

    def run(self) -> AttemptEnd:
        """Start all nodes, write their output, and wait for their end. In every case, all nodes are ended."""
        try:
            if self._place():
                self._start()
            limit = self._request.time_limit_seconds
            self._drain(
                float("inf") if limit is None else time.monotonic() + limit - self._request.save_seconds
            )
            # Those that were told to stop come last: they are no cause.
            failed = sorted(filter(None, self._codes.values()), key=lambda code: code == _STOPPED_EXIT_CODE)
            has_saved = RESUME_EXIT_CODE in failed
            return AttemptEnd(exit_code=failed[0] if failed else 0, lost=self._lost, has_saved=has_saved)
        finally:
            for node in self._nodes:
                ray.kill(node)
            if self._group is not None:
                remove_placement_group(self._group)

    def _place(self) -> bool:
        """Reserve the resources of all nodes together; return False if the job was cancelled first."""
        job, strategy, num_nodes = self._job, self._job.strategy, self._request.num_nodes
        if strategy == "auto":  # each task on a node of its own, where there are as many nodes
            alive = sum(1 for node in ray.nodes() if node["Alive"])
            strategy = "STRICT_SPREAD" if alive >= num_nodes else "SPREAD"
            if strategy == "SPREAD":
                say(
                    f"{num_nodes} nodes are asked for, and the cluster has {alive}: they share its nodes where "
                    "they must"
                )
        self._group = placement_group([job.bundle] * num_nodes, strategy=strategy)
        ready, began, told = self._group.ready(), time.monotonic(), 0.0
        while not self._cancelled.is_set():
            with suppress(GetTimeoutError):
                ray.get(ready, timeout=_POLL_SECONDS)
                return True
            waited = time.monotonic() - began
            what = f"{num_nodes} x {job.bundle}; the cluster has {ray.cluster_resources()}"
            if job.wait_seconds is not None and waited >= job.wait_seconds:
                raise ClusterError(
                    f"after {waited:.0f} s still no place for {what}. Ask for less, or wait longer with "
                    "--option wait-seconds=N"
                )
            if waited >= told + _TELL_SECONDS:
                told = waited
                say(f"waiting for {what}")
        return False

    def _start(self) -> None:
        job, request = self._job, self._request
        node_class: Any = ray.remote(Node)
        for rank in range(request.num_nodes):
            resources = {k: v for k, v in job.bundle.items() if k not in ("CPU", "GPU", "memory")}
            options = node_class.options(
                num_cpus=job.bundle["CPU"],
                num_gpus=job.bundle.get("GPU", 0),
                memory=job.bundle.get("memory"),
                resources=resources,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, rank),
            )
            self._nodes.append(options.remote())
        try:
            places = ray.get([node.describe.remote() for node in self._nodes])
        except RayError as error:
            self._lose(error)
            return
        address, port, _ = places[0]
        folder = None if job.upload else str(request.folder)
        for rank, (node, (_, _, devices)) in enumerate(zip(self._nodes, places, strict=True)):
            place = {
                "job_id": job.job_id,
                "num_nodes": request.num_nodes,
                "node_rank": rank,
                "master_addr": address,
                "master_port": port,
                "restart_count": self._number,
            }
            variables = {**request.environment, **ray_variables(place, devices=devices)}
            run = node.run.options(num_returns="streaming")
            self._streams[rank] = run.remote(request.command, folder, variables)

    def _drain(self, deadline: float) -> None:
        """Write the output of all nodes until they end; tell them to stop at the deadline, or once one has failed."""
        while self._streams:
            ready, _ = ray.wait(list(self._streams.values()), num_returns=1, timeout=_POLL_SECONDS)
            for rank in [rank for rank, stream in self._streams.items() if stream in ready]:
                self._take(rank)
            now = time.monotonic()
            must_stop = self._cancelled.is_set() or bool(self._lost) or any(self._codes.values())
            if self._stop_at == float("inf") and (now > deadline or must_stop):
                self._stop_at = time.monotonic()
                for rank in self._streams:
                    self._nodes[rank].stop.remote()
            # If a node failed, no other can save: its collectives wait for the one that is gone.
            has_failed = any(
                code not in (0, RESUME_EXIT_CODE, _STOPPED_EXIT_CODE) for code in self._codes.values()
            )
            if now > self._stop_at + _MARGIN_SECONDS + (0 if has_failed else self._request.save_seconds):
                left = ", ".join(map(str, self._streams))
                self._write(f"drivetrain: node {left} did not end in time and was killed\n")
                self._streams.clear()
                self._codes.setdefault(self._request.num_nodes, 1)

    def _take(self, rank: int) -> None:
        """Take the next output of a node."""
        try:
            item: Any = ray.get(next(self._streams[rank]))
        except StopIteration:
            self._close(rank)
        except RayError as error:
            self._close(rank)
            self._lose(error, rank)
        else:
            if not isinstance(item, int):
                self._write_lines(rank, item)
                return
            self._codes[rank] = item
            # One that SIGTERM ended, which nobody here has sent, was preempted.
            if item == _STOPPED_EXIT_CODE and self._stop_at == float("inf"):
                self._lost = self._lost or f"node {rank} was stopped before its ranks had saved"

    def _write_lines(self, rank: int, text: str) -> None:
        """Write whole lines with their node in front."""
        *lines, rest = (self._partial.get(rank, "") + text).split("\n")
        self._partial[rank] = rest
        mark = f"[node {rank}] " if self._request.num_nodes > 1 else ""
        if lines:
            self._write("".join(f"{mark}{line}\n" for line in lines))

    def _close(self, rank: int) -> None:
        del self._streams[rank]
        if self._partial.pop(rank, ""):
            self._write_lines(rank, "\n")

    def _lose(self, error: RayError, rank: int | None = None) -> None:
        where = "a node" if rank is None else f"node {rank}"
        self._lost = self._lost or f"{where} was lost: {str(error).strip().splitlines()[0]}"
