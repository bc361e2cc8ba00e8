"""Ray as a cluster: jobs go to its Jobs API, and a driver in the cluster starts a launcher on each node.

Every launch asks each cluster for its placement. To keep starts fast, modules that submit are imported on use.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from drivetrain_clusters.errors import ClusterError
from drivetrain_clusters.protocol import JobPlacement, JobRequest, Submission
from drivetrain_clusters.ray.placement import ray_placement

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,199}", re.ASCII)


class Ray:
    """A Ray cluster, whose nodes have drivetrain installed; RAY_ADDRESS or the option `address` selects it.

    The id of a job is the id in the Jobs API, followed by "@ADDRESS" if the option `address` was given.
    """

    placement = staticmethod(ray_placement)

    def requeue(self, placement: JobPlacement) -> bool:
        """Return False: the job's driver starts it again once its launchers have ended with exit code 75."""
        del placement
        return False

    def plan(self, request: JobRequest) -> Submission:
        """Return the description of the job, which is submitted through Ray's library. Pure."""
        import json

        from drivetrain_clusters.ray.job import plan_ray
        from drivetrain_clusters.request_values import file_stem
        from drivetrain_config.values.kinds import plain

        job = plan_ray(request)
        where = f"all nodes must see {request.folder}; --option upload=true copies it to them instead"
        if job.upload:
            where = (
                f"{request.folder} is copied to the nodes for each start; write checkpoints to a folder that all "
                "nodes share, named from its root"
            )
        path = request.log_dir / f"{file_stem(request)}.ray.json"
        return Submission(
            files={path: json.dumps(plain(job), indent=2) + "\n"},
            command=(),
            request=request,
            notes=(where, f"Ray runs `{job.entrypoint}` on the head node, which starts the nodes"),
        )

    def submit(self, submission: Submission) -> str:
        """Submit the job through Ray's Jobs API, and return its id."""
        from uuid import uuid4

        from drivetrain_clusters.ray.job import JOB_VARIABLE, plan_ray

        request = submission.request
        safe = re.sub(r"[^A-Za-z0-9]+", "-", request.name).strip("-")[:100] or "job"
        job = replace(plan_ray(request), job_id=f"{safe}-{uuid4().hex[:8]}")
        runtime: dict[str, Any] = {"env_vars": {JOB_VARIABLE: job.encode()}}
        if job.upload:
            runtime["working_dir"] = str(request.folder)
        client = _client(job.address)
        try:
            client.submit_job(entrypoint=job.entrypoint, submission_id=job.job_id, runtime_env=runtime)
        except (RuntimeError, ValueError) as error:
            raise ClusterError(f"Ray refused the job: {error}") from error
        return job.job_id if job.address is None else f"{job.job_id}@{job.address}"

    def follow(self, job_id: str, submission: Submission, write: Callable[[str], None]) -> int:
        """Write the output of all nodes until the job ends; return its exit code."""
        from drivetrain_clusters.ray.output import JobOutput

        del submission
        submission_id, address = _parse(job_id)
        return JobOutput(_client(address), submission_id, write).follow()

    def cancel(self, job_id: str) -> None:
        """Stop the job; its ranks have 3 s to save, unless the cluster's RAY_JOB_STOP_WAIT_TIME_S differs."""
        submission_id, address = _parse(job_id)
        try:
            is_stopped = _client(address).stop_job(submission_id)
        except RuntimeError as error:
            raise ClusterError(f"job {job_id}: Ray does not know it: {error}") from error
        if not is_stopped:
            raise ClusterError(f"job {job_id}: has ended already")


def _parse(job_id: str) -> tuple[str, str | None]:
    """Split a job's id into the Jobs API's id, which becomes a part of a URL, and the address."""
    submission_id, mark, address = job_id.partition("@")
    if _ID.fullmatch(submission_id) is None:
        raise ClusterError(f"job {job_id!r}: a job on ray is ID or ID@http://HOST:PORT")
    return submission_id, address if mark else None


def _client(address: str | None) -> Any:
    try:
        from ray.exceptions import RayError
        from ray.job_submission import JobSubmissionClient
    except ImportError as error:
        raise ClusterError(
            "Ray is not installed here: pip install 'drivetrain-clusters[ray]' brings it, with its Jobs API"
        ) from error
    try:
        return JobSubmissionClient(address)
    except (ConnectionError, RuntimeError, ValueError, RayError) as error:
        raise ClusterError(
            f"Ray cannot be reached at {address or 'the address of RAY_ADDRESS, or on this machine'}: {error}; "
            "--option address=http://HOST:8265 names the cluster's dashboard"
        ) from error
