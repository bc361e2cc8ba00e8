"""A TPU slice of several hosts: each says which of them it is; a job runs its command on each by a remote shell."""

import shlex
from collections.abc import Mapping
from dataclasses import replace

from drivetrain_clusters.errors import ClusterError
from drivetrain_clusters.job_variables import JobVariables, job_port
from drivetrain_clusters.kubernetes.placement import kubernetes_placement
from drivetrain_clusters.local.cluster import Local
from drivetrain_clusters.local.script import plan_local
from drivetrain_clusters.protocol import RESUME_EXIT_CODE, JobPlacement, JobRequest, Submission
from drivetrain_clusters.request_values import check_known, launch_variables

INDEX, HOSTS = "TPU_WORKER_ID", "TPU_WORKER_HOSTNAMES"
_OPTIONS = ("hosts", "remote_shell")


class TpuPod(Local):
    """The cluster `tpu-pod`: hosts of one TPU slice, without a queue.

    A job is a script on this machine that runs the command on each of the hosts given, by `ssh -tt` or another remote
    shell, and ends with the code of the first host that failed; `Local` starts, follows and cancels it.
    """

    def placement(self, environment: Mapping[str, str]) -> JobPlacement | None:
        """Return the place of a host of a slice, by the variables of its virtual machine; None on a single host.

        A pod whose Kubernetes job says where the nodes meet has its place by that.
        """
        hosts = [host for host in environment.get(HOSTS, "").split(",") if host]
        if len(hosts) < 2 or kubernetes_placement(environment) is not None:
            return None
        read = JobVariables("tpu-pod", environment)
        own, _ = read.integer(INDEX)
        if own >= len(hosts):
            raise read.contradict(f"there are {len(hosts)} hosts, counted from 0", INDEX, HOSTS)
        job_id = environment.get("TPU_NAME") or "tpu-pod"
        return JobPlacement(
            cluster="tpu-pod",
            job_id=job_id,
            num_nodes=len(hosts),
            node_rank=own,
            tasks_per_node=1,
            local_task=0,
            num_tasks=len(hosts),
            task_rank=own,
            master_addr=hosts[0],
            master_port=job_port(job_id),
            hosts=tuple(hosts),
            sources={"num_nodes": HOSTS, "node_rank": INDEX, "task_rank": INDEX, "master_addr": HOSTS},
        )

    def plan(self, request: JobRequest) -> Submission:
        """Return the script of a job on this machine that runs the command on all hosts, and what starts it."""
        check_known("tpu-pod", request.options, _OPTIONS)
        hosts = [host for host in request.options.get("hosts", "").split(",") if host]
        if not hosts:
            raise ClusterError(
                "tpu-pod: name the hosts of the slice in the order of their workers: --option hosts=HOST,HOST"
            )
        if request.num_nodes not in (1, len(hosts)):
            raise ClusterError(
                f"tpu-pod: num_nodes={request.num_nodes}, but {len(hosts)} hosts are given: leave it out"
            )
        remote = shlex.split(request.options.get("remote_shell", "ssh -tt"))
        of_all = {**launch_variables(request), HOSTS: ",".join(hosts)}
        lines = [_on_host(remote, host, {**of_all, INDEX: str(n)}, request) for n, host in enumerate(hosts)]
        script = "\n".join(["pids=", *lines, _WAIT.replace("{resume}", str(RESUME_EXIT_CODE))])
        of_machine = replace(request, command=("sh", "-c", script), options={}, num_nodes=1)
        return replace(plan_local(of_machine), request=request)


_WAIT = """code=0
trap 'kill -TERM $pids 2>/dev/null' TERM INT
for pid in $pids; do
    wait "$pid"; ended=$?
    while kill -0 "$pid" 2>/dev/null; do wait "$pid"; ended=$?; done
    if [ "$ended" != 0 ] && [ "$code" = 0 ]; then
        code=$ended
        [ "$code" = {resume} ] || kill -TERM $pids 2>/dev/null  # of those that have saved, all end by themselves
    fi
done
exit "$code\""""


def _on_host(remote: list[str], host: str, variables: Mapping[str, str], request: JobRequest) -> str:
    """Return the line that runs the command on a host in the background."""
    exported = " ".join(f"{name}={shlex.quote(text)}" for name, text in variables.items())
    words = shlex.join(request.command)
    command = f"cd {shlex.quote(str(request.folder.absolute()))} && exec env {exported} {words}"
    return f'{shlex.join([*remote, host, command])} & pids="$pids $!"'
