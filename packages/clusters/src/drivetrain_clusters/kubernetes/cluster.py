"""Kubernetes as a cluster: jobs are JobSets, and kubectl submits them.

Every launch asks each cluster for its placement. To keep starts fast, modules that submit are imported on use.
"""

from collections.abc import Callable

from drivetrain_clusters.kubernetes.placement import kubernetes_placement
from drivetrain_clusters.protocol import JobPlacement, JobRequest, Submission


class Kubernetes:
    """A Kubernetes cluster in which JobSet 0.6 or newer is installed; kubectl's context selects it.

    A job is a JobSet with one pod for each node. The JobSet starts all pods again after a preemption, and after the
    ranks have saved and ended with exit code 75.
    """

    placement = staticmethod(kubernetes_placement)

    def requeue(self, placement: JobPlacement) -> bool:
        """Return False: the JobSet starts the job again once its launchers have ended with exit code 75."""
        del placement
        return False

    def plan(self, request: JobRequest) -> Submission:
        """Return the manifest and the command that creates the JobSet. Pure."""
        from drivetrain_clusters.kubernetes.kubectl import KUBECTL
        from drivetrain_clusters.kubernetes.manifest import jobset_manifest, to_yaml
        from drivetrain_clusters.kubernetes.options import read_kubernetes_options

        options = read_kubernetes_options(request)
        manifest = jobset_manifest(request, options)
        name: str = manifest["metadata"]["name"]
        path = request.log_dir / f"{name}.jobset.yaml"
        notes = [f"the image must hold {request.folder}, or a volume of --option volumes=CLAIM:/FOLDER must"]
        if name != request.name:
            notes.append(f"the job is called {name} there, since Kubernetes does not allow {request.name!r}")
        return Submission(
            files={path: to_yaml(manifest)},
            # Not apply: to change a job that is there would be refused, or would break it.
            command=(KUBECTL, "create", f"--filename={path}"),
            request=request,
            notes=tuple(notes),
        )

    def submit(self, submission: Submission) -> str:
        """Create the JobSet, and return its namespace and name."""
        from drivetrain_clusters.kubernetes.kubectl import read_objects

        made = read_objects(submission.command[1:])["metadata"]
        return f"{made['namespace']}/{made['name']}"

    def follow(self, job_id: str, submission: Submission, write: Callable[[str], None]) -> int:
        """Write the output of all nodes until the JobSet ends; return the exit code of the node that failed first."""
        from drivetrain_clusters.kubernetes.jobset_output import JobSetOutput

        return JobSetOutput(job_id, submission.request.num_nodes, write).follow()

    def cancel(self, job_id: str) -> None:
        """Delete the JobSet; its pods have time to save."""
        from drivetrain_clusters.kubernetes.kubectl import parse_job_id, run_kubectl

        namespace, name = parse_job_id(job_id)
        run_kubectl(["delete", "jobset", name, f"--namespace={namespace}", "--wait=false"])
