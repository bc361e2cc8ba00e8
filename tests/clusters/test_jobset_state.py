from drivetrain_clusters.kubernetes.jobset_state import (
    JobSetState,
    PodState,
    exit_code_of,
    read_jobset,
    read_pods,
)


def pod(rank: int, exit_code: int | None, ended_at: str) -> PodState:
    return PodState(
        name=f"pod-{rank}",
        node_rank=rank,
        has_started=True,
        is_running=exit_code is None,
        exit_code=exit_code,
        ended_at=ended_at,
        waits_for="",
    )


def test_a_new_jobset_has_no_state_yet() -> None:
    assert read_jobset({}) == JobSetState(end=None, message="", restarts=0)
    assert read_jobset({"status": {"conditions": [{"type": "Failed", "status": "False"}]}}).end is None


def test_the_exit_code_is_that_of_the_pod_that_failed_first() -> None:
    failed = JobSetState(end="Failed", message="", restarts=0)
    pods = [
        pod(0, 1, "2026-01-01T00:00:02Z"),
        pod(1, 3, "2026-01-01T00:00:01Z"),
        pod(2, 0, "2026-01-01T00:00:00Z"),
    ]
    assert exit_code_of(failed, pods) == 3
    assert exit_code_of(failed, []) == 1
    assert exit_code_of(JobSetState(end="Completed", message="", restarts=1), pods) == 0


def test_a_pod_that_waits_says_why() -> None:
    unscheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no GPU"}
    data = {
        "items": [
            {
                "metadata": {"name": "b", "labels": {"batch.kubernetes.io/job-completion-index": "1"}},
                "status": {},
            },
            {
                "metadata": {"name": "a", "annotations": {"batch.kubernetes.io/job-completion-index": "0"}},
                "status": {"conditions": [unscheduled]},
            },
        ]
    }
    first, second = read_pods(data)
    assert (first.name, first.waits_for, first.has_started) == ("a", "Unschedulable: no GPU", False)
    assert (second.name, second.waits_for) == ("b", "Pending")
