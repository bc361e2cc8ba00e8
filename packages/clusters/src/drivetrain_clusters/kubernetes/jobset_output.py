"""Follow the output of a JobSet's pods, across its restarts, until it ends."""

import re
import time
from collections.abc import Callable
from functools import partial
from threading import Thread

from drivetrain_clusters.errors import ClusterError
from drivetrain_clusters.kubernetes.jobset_state import (
    JobSetState,
    PodState,
    exit_code_of,
    read_jobset,
    read_pods,
)
from drivetrain_clusters.kubernetes.kubectl import parse_job_id, read_objects, start_kubectl
from drivetrain_clusters.kubernetes.manifest import CONTAINER
from drivetrain_clusters.system_command import patiently
from drivetrain_messages import list_some, say

_POLL_SECONDS = 2.0
_NAME_LABEL = "jobset.sigs.k8s.io/jobset-name"
_ATTEMPT_LABEL = "jobset.sigs.k8s.io/restart-attempt"
# [pod/NAME/CONTAINER] 2026-01-31T12:00:00.123456789Z TEXT
_LINE = re.compile(r"\[pod/(?P<pod>[^/\]]+)/[^\]]*\] (?P<time>\S+) ?(?P<text>.*)", re.DOTALL)


class JobSetOutput:
    """The output of a JobSet with `num_nodes` pods, of which each line is written once."""

    def __init__(self, job_id: str, num_nodes: int, write: Callable[[str], None]) -> None:
        self._job_id = job_id
        namespace, self._name = parse_job_id(job_id)
        self._where = f"--namespace={namespace}"
        self._num_nodes = num_nodes
        self._write = write
        # The time of the newest line of each pod, with which a connection that broke goes on.
        self._newest: dict[str, str] = {}
        self._told = ""

    def follow(self) -> int:
        """Write the output until the JobSet ends, and return its exit code."""
        read_attempts: set[int] = set()
        self._state()  # a job that is not there is an error at once
        while True:
            state = patiently(self._state)
            selected = f"--selector={self._selector(state.restarts)}"
            get_pods = ["get", "pods", self._where, selected]
            pods = read_pods(patiently(partial(read_objects, get_pods)))
            started = [pod for pod in pods if pod.has_started]
            is_new = state.restarts not in read_attempts and len(started) == self._num_nodes
            if is_new or (state.restarts in read_attempts and any(pod.is_running for pod in pods)):
                if is_new and state.restarts:
                    self._tell(f"job {self._job_id} starts again, restart {state.restarts}")
                elif not is_new:
                    # The connection broke, or the cluster has not yet noticed the end.
                    time.sleep(_POLL_SECONDS)
                read_attempts.add(state.restarts)
                self._stream(state.restarts, pods)
            elif state.end is not None:
                if started and state.restarts not in read_attempts:
                    self._stream(state.restarts, pods)
                self._tell(
                    f"job {self._job_id} {state.end.lower()}: {state.message}" if state.message else ""
                )
                return exit_code_of(state, pods)
            else:
                waiting = [f"node {pod.node_rank} ({pod.waits_for})" for pod in pods if not pod.has_started]
                if waiting:
                    self._tell(f"waiting for {list_some(waiting, most=3)}")
                time.sleep(_POLL_SECONDS)

    def _state(self) -> JobSetState:
        return read_jobset(read_objects(["get", "jobset", self._name, self._where]))

    def _selector(self, attempt: int) -> str:
        return f"{_NAME_LABEL}={self._name},{_ATTEMPT_LABEL}={attempt}"

    def _tell(self, text: str) -> None:
        """Write a message unless it was the last one."""
        if text and text != self._told:
            say(text)
        self._told = text

    def _stream(self, attempt: int, pods: tuple[PodState, ...]) -> None:
        """Write the output of all pods, with their nodes, until the pods or the connection end.

        Lines that an earlier connection has shown are left out.
        """
        words = ["logs", "--follow", "--prefix", "--timestamps", "--tail=-1", f"--container={CONTAINER}"]
        words += [self._where, f"--selector={self._selector(attempt)}"]
        words += [f"--max-log-requests={max(self._num_nodes, 5)}"]
        seen = [self._newest[pod.name] for pod in pods if pod.name in self._newest]
        if len(seen) == len(pods):
            words.append(f"--since-time={min(seen)}")
        process = start_kubectl(words)
        assert process.stdout is not None
        assert process.stderr is not None
        errors: list[str] = []
        reader = Thread(target=errors.extend, args=(process.stderr,), daemon=True)
        reader.start()
        ranks = {pod.name: pod.node_rank for pod in pods}
        before, is_marked = dict(self._newest), self._num_nodes > 1
        try:
            for line in process.stdout:
                form = _LINE.match(line)
                if form is None:
                    self._write(line)
                    continue
                pod, stamp = form["pod"], form["time"]
                # Without the Z, times of different precision are in the order of their text.
                if stamp.removesuffix("Z") > before.get(pod, "").removesuffix("Z"):
                    self._newest[pod] = stamp
                    self._write(f"[node {ranks.get(pod, 0)}] {form['text']}" if is_marked else form["text"])
            process.wait()
            reader.join()
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
        if process.returncode != 0 and not self._newest:
            raise ClusterError(f"kubectl logs failed: {''.join(errors).strip()}")
