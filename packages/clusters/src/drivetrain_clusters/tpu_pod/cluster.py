"""A TPU slice of several hosts: each says which of them it is; a job runs its command on each by a remote shell."""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path

from drivetrain_clusters.errors import ClusterError
from drivetrain_clusters.job_variables import JobVariables, job_port
from drivetrain_clusters.kubernetes.placement import kubernetes_placement
from drivetrain_clusters.local.cluster import Local
from drivetrain_clusters.local.script import plan_local
from drivetrain_clusters.protocol import RESUME_EXIT_CODE, JobPlacement, JobRequest, Submission
from drivetrain_clusters.request_values import OptionReader, check_request, file_stem, launch_variables

INDEX, HOSTS, TOPOLOGY = "TPU_WORKER_ID", "TPU_WORKER_HOSTNAMES", "TORCH_TPU_TOPOLOGY"
_OPTIONS = ("hosts", "remote_shell")
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9.:_-]*")
_WIRING = re.compile(r"[1-9][0-9]{0,3}(,[1-9][0-9]{0,3}){2,3}")
_DEVICES_OF_A_HOST = (1, 2, 4, 8)


class TpuPod(Local):
    """The cluster `tpu-pod`: hosts of one TPU slice, without a queue.

    A job is a script on this machine that runs the command on each of the hosts given, by `ssh` or another remote
    shell, and ends with the code of the first host that failed; `Local` starts, follows and cancels it. What a host
    runs reaches its shell over standard input, since anybody may read the words of a command.
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
        read = OptionReader("tpu-pod", request.options, _OPTIONS)
        check_request("tpu-pod", request)
        hosts = read.several("hosts", _HOST, "the name or address of a host")
        if not hosts:
            raise ClusterError(
                "tpu-pod: name the hosts of the slice in the order of their workers: --option hosts=HOST,HOST"
            )
        if repeated := [host for host in dict.fromkeys(hosts) if hosts.count(host) > 1]:
            raise ClusterError(
                f"--option hosts={','.join(hosts)}: names {repeated[0]} twice; name each host once"
            )
        if request.num_nodes not in (1, len(hosts)):
            raise ClusterError(
                f"tpu-pod: num_nodes={request.num_nodes}, but {len(hosts)} hosts are given: leave it out"
            )
        if request.device in ("auto", "tpu"):
            _check_for_tpus(request, len(hosts))
        remote = shlex.split(request.options.get("remote_shell", "ssh"))
        path = request.log_dir.absolute() / f"{file_stem(request)}.host.sh"
        lines = [_on_host([*remote, host, f"exec sh -s {n}"], path) for n, host in enumerate(hosts)]
        script = "\n".join(["pids=", *lines, _WAIT.replace("{resume}", str(RESUME_EXIT_CODE))])
        of_machine = replace(request, command=("sh", "-c", script), options={}, num_nodes=1, environment={})
        planned = plan_local(of_machine)
        return replace(planned, files={**planned.files, path: _host_script(request, hosts)}, request=request)


def _check_for_tpus(request: JobRequest, num_hosts: int) -> None:
    """Refuse what torch_tpu cannot run on so many hosts."""
    if request.mixed_precision not in ("no", "bf16", "auto"):
        raise ClusterError(
            f"tpu-pod: mixed_precision={request.mixed_precision}: TPUs compute in fp32 and bf16: say bf16, auto or no"
        )
    wiring, of_host = request.environment.get(TOPOLOGY), request.processes_per_node
    if wiring is None:
        if num_hosts > 1:
            raise ClusterError(
                f"tpu-pod: {num_hosts} hosts, and nothing says how the devices of the whole slice are wired: "
                f"--env {TOPOLOGY}=2,4,1 for eight devices in 2 x 4 x 1; --cpu does without"
            )
        return
    if _WIRING.fullmatch(wiring) is None:
        raise ClusterError(
            f"{TOPOLOGY}={wiring}: must be the number of devices along each dimension of the whole slice, three or "
            "four numbers from 1 on between commas, such as 2,4,1"
        )
    wired = prod(map(int, wiring.split(",")))
    allowed = [num_hosts * each for each in ((of_host,) if of_host else _DEVICES_OF_A_HOST)]
    if wired not in allowed:
        raise ClusterError(
            f"{TOPOLOGY}={wiring}: wires {wired} devices, but the hosts given, {num_hosts}, have together "
            f"{' or '.join(map(str, allowed))}: say the wiring of the whole slice, and all of its hosts"
        )


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

# A shell reads all between the braces before it runs any of it. The input ends where the remote shell has ended.
_OF_HOST = """# Written by drivetrain submit; read by the shell of each host.
{{
cd {folder} || exit 1
{exports}
export {index}=$1
exec 3<&0 </dev/null
{command} 3<&- &
child=$!
trap 'kill -TERM "$child" 2>/dev/null' TERM INT HUP
{{ while read -r line; do :; done; kill -TERM "$child"; }} <&3 >/dev/null 2>&1 &
watch=$!
wait "$child"; code=$?
while kill -0 "$child" 2>/dev/null; do wait "$child"; code=$?; done
kill "$watch" 2>/dev/null
exit "$code"
}}
"""


def _host_script(request: JobRequest, hosts: Sequence[str]) -> str:
    """Return what the shell of each host runs, with the number of the host as its argument."""
    variables = {**launch_variables(request), HOSTS: ",".join(hosts)}
    return _OF_HOST.format(
        folder=shlex.quote(str(request.folder.absolute())),
        exports="\n".join(f"export {name}={shlex.quote(text)}" for name, text in variables.items()),
        index=INDEX,
        command=shlex.join(request.command),
    )


def _on_host(words: list[str], script: Path) -> str:
    """Return the line that has a shell on a host read a script, and empty lines until it ends, in the background."""
    feed = f"cat {shlex.quote(str(script))}; while sleep 1 && echo; do :; done 2>/dev/null"
    return f'{{ {feed}; }} | {shlex.join(words)} & pids="$pids $!"'
