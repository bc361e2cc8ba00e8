"""The script of a Slurm job: options for sbatch, and a command that no shell can misread."""

import re
import shlex

from drivetrain_clusters.errors import ClusterError
from drivetrain_clusters.protocol import JobRequest, Submission
from drivetrain_clusters.request_values import check_request, file_stem, launch_variables, memory_bytes
from drivetrain_clusters.system_command import in_this_python
from drivetrain_messages import suggest

# The options of sbatch that a request may add; the others are set by the request's own fields, or change what a
# script is.
_OPTION_NAMES = """
    account begin comment constraint contiguous core-spec cpus-per-gpu deadline delay-boot dependency
    distribution exclude exclusive extra-node-info gid gpu-bind gpu-freq gpus-per-task gres gres-flags hint
    ignore-pbs kill-on-invalid-dep licenses mail-type mail-user mcs-label mem-bind mem-per-cpu mem-per-gpu
    network nice nodelist overcommit oversubscribe partition power prefer priority profile propagate qos
    reboot reservation spread-job switches thread-spec threads-per-core time-min tmp uid use-min-nodes wckey
"""
OPTIONS = frozenset(_OPTION_NAMES.split())
# sbatch's option -> the request that sets it.
_OURS = {
    "job-name": "the job's name",
    "nodes": "the number of nodes",
    "ntasks": "the number of nodes: one task a node is started",
    "ntasks-per-node": "the number of nodes: one task a node is started",
    "cpus-per-task": "the number of cores of each node",
    "gpus": "the number of accelerators of each node",
    "gpus-per-node": "the number of accelerators of each node",
    "mem": "the memory of each node",
    "time": "the time limit",
    "signal": "the seconds to save",
    "requeue": "the number of requeues",
    "no-requeue": "the number of requeues",
    "output": "the folder of logs",
    "error": "the folder of logs",
    "open-mode": "the folder of logs",
    "chdir": "the job's folder",
    "export": "the job's environment",
}
_PLAIN = re.compile(r"[A-Za-z0-9_.,:/@%+=\[\]*-]*")  # what an #SBATCH line takes without quotes
_LONGEST_SAVE_SECONDS = 65535


def plan_slurm(request: JobRequest) -> Submission:
    """Return the script of a job, and the command that submits it.

    Each word of the launcher's command is in single quotes. Options that would need quotes in an #SBATCH line become
    arguments of sbatch, which no shell reads.
    """
    _check(request)
    slug = file_stem(request)
    path = request.log_dir.absolute() / f"{slug}.sbatch"  # the job runs in another folder
    options = _options(request, slug)
    on_lines = [option for option in options if _PLAIN.fullmatch(option)]
    as_arguments = [option for option in options if option not in on_lines]
    environment = {"DRIVETRAIN_LAUNCH__MAX_REQUEUES": str(request.max_requeues)}
    if request.cpus_per_node is not None:
        # srun takes it from sbatch no more since 22.05.
        environment["SRUN_CPUS_PER_TASK"] = str(request.cpus_per_node)
    environment |= launch_variables(request)
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {option}" for option in on_lines),
        *(f"# and as an argument of sbatch: {shlex.quote(option)}" for option in as_arguments),
        "",
        *(f"export {name}={shlex.quote(text)}" for name, text in environment.items()),
        "",
        f"exec srun --ntasks={request.num_nodes} --ntasks-per-node=1 --kill-on-bad-exit=1 "
        f"{shlex.join(in_this_python(request.command))}",
        "",
    ]
    note = "the job is not requeued after a preemption or at its time limit"
    if request.max_requeues:
        note = (
            f"told to save {request.save_seconds} s before the time limit; then it starts again, at most "
            f"{request.max_requeues} times"
        )
    return Submission(
        files={path: "\n".join(lines)},
        command=("sbatch", "--parsable", *as_arguments, str(path)),
        request=request,
        notes=(note,),
    )


def _options(request: JobRequest, slug: str) -> list[str]:
    options = [
        f"--job-name={request.name}",
        f"--nodes={request.num_nodes}",
        f"--ntasks={request.num_nodes}",
        "--ntasks-per-node=1",
        f"--chdir={request.folder.absolute()}",
        f"--output={request.log_dir.absolute() / slug}-%j.out",
        "--open-mode=append",
        # Without B: the tasks of srun are told, that is the launchers.
        f"--signal=TERM@{request.save_seconds}",
        "--requeue" if request.max_requeues else "--no-requeue",
    ]
    if request.accelerators_per_node:
        options.append(f"--gpus-per-node={request.accelerators_per_node}")
    if request.cpus_per_node is not None:
        options.append(f"--cpus-per-task={request.cpus_per_node}")
    if request.memory_per_node is not None:
        # Slurm's units are powers of 1024, whatever they are called.
        mebibytes = -(-memory_bytes(request.memory_per_node) // 2**20)
        options.append(f"--mem={mebibytes}M" if mebibytes % 1024 else f"--mem={mebibytes // 1024}G")
    if request.time_limit_seconds is not None:
        hours, rest = divmod(request.time_limit_seconds, 3600)
        options.append(f"--time={hours}:{rest // 60:02}:{rest % 60:02}")
    return [
        *options,
        *(f"--{name}={text}" if text else f"--{name}" for name, text in request.options.items()),
    ]


def _check(request: JobRequest) -> None:
    check_request("slurm", request)
    texts = {"name": request.name, "folder": str(request.folder), "log_dir": str(request.log_dir)}
    for what, text in {**texts, **request.options}.items():
        if any(ord(character) < 32 or ord(character) == 127 for character in text):
            raise ClusterError(
                f"slurm: {what}={text!r}: Slurm takes no control characters there; leave them out"
            )
    if set("%\\") & set(str(request.log_dir)):
        raise ClusterError(
            f"slurm: log_dir={str(request.log_dir)!r}: Slurm replaces % and \\ there; say another folder"
        )
    if request.num_nodes < 1:
        raise ClusterError(f"slurm: num_nodes={request.num_nodes}: must be at least 1")
    most = _LONGEST_SAVE_SECONDS
    if not 0 < request.save_seconds <= most:
        raise ClusterError(f"slurm: save_seconds={request.save_seconds}: Slurm takes 1 to {most}")
    for name in request.options:
        if name in _OURS:
            raise ClusterError(f"slurm: option {name!r}: it follows from {_OURS[name]}; set that instead")
        if name not in OPTIONS:
            hint = suggest(name, OPTIONS) or f"; there are {', '.join(sorted(OPTIONS))}"
            raise ClusterError(
                f"slurm: option {name!r}: sbatch has no such option for a job of drivetrain{hint}"
            )
