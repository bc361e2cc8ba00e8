"""The states of a JobSet and of its pods, read from the cluster's JSON. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

_INDEX = "batch.kubernetes.io/job-completion-index"


@dataclass(frozen=True, slots=True, kw_only=True)
class PodState:
    """The state of a pod with a single container. `waits_for` is the reason why the container has not started.

    Until the container has ended, `exit_code` is None and `ended_at`, a time as the cluster writes it, is empty.
    """

    name: str
    node_rank: int
    has_started: bool
    is_running: bool
    exit_code: int | None
    ended_at: str
    waits_for: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSetState:
    """The state of a JobSet: its end (None while it runs), the cluster's message on the end, and its restarts."""

    end: Literal["Completed", "Failed"] | None
    message: str
    restarts: int


def read_jobset(data: Mapping[str, Any]) -> JobSetState:
    """Return the state of a JobSet from its JSON."""
    status: Mapping[str, Any] = data.get("status") or {}
    ends = (c for c in status.get("conditions") or () if c.get("type") in ("Completed", "Failed"))
    end: Mapping[str, Any] = next((c for c in ends if c.get("status") == "True"), {})
    restarts = int(status.get("restarts", 0))
    return JobSetState(end=end.get("type"), message=str(end.get("message", "")), restarts=restarts)


def read_pods(data: Mapping[str, Any]) -> tuple[PodState, ...]:
    """Return the states of pods from the JSON of their list, in order of their nodes' ranks."""
    pods: list[PodState] = []
    for pod in data.get("items") or ():
        metadata, status = pod["metadata"], pod.get("status") or {}
        marks = {**(metadata.get("labels") or {}), **(metadata.get("annotations") or {})}
        containers = status.get("containerStatuses") or ({},)
        state: Mapping[str, Any] = containers[0].get("state") or {}
        ended: Mapping[str, Any] = state.get("terminated") or {}
        has_started = "running" in state or "terminated" in state
        # Why it waits: the reason, and the cluster's own sentence about it.
        scheduled = [c for c in status.get("conditions") or () if c.get("type") == "PodScheduled"]
        reasons = [each for each in (state.get("waiting") or {}, *scheduled) if each.get("reason")]
        reason = reasons[0] if reasons else {}
        words = (reason.get("reason", "Pending"), reason.get("message", ""))
        pods.append(
            PodState(
                name=metadata["name"],
                node_rank=int(marks.get(_INDEX, 0)),
                has_started=has_started,
                is_running="running" in state,
                exit_code=ended.get("exitCode"),
                ended_at=str(ended.get("finishedAt") or ""),
                waits_for="" if has_started else ": ".join(filter(None, words)),
            )
        )
    return tuple(sorted(pods, key=lambda pod: pod.node_rank))


def exit_code_of(state: JobSetState, pods: Iterable[PodState]) -> int:
    """Return the exit code of a job that ended: that of the pod that failed first, or 1 if no such pod is left."""
    if state.end == "Completed":
        return 0
    failed = [pod for pod in pods if pod.exit_code]
    first = min(failed, key=lambda pod: (pod.ended_at, pod.node_rank), default=None)
    return 1 if first is None or first.exit_code is None else first.exit_code
