"""Build the request of a job from the arguments of `drivetrain submit` and the settings of its launch. Pure."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from drivetrain_clusters.protocol import JobRequest
from drivetrain_clusters.request_values import memory_bytes
from drivetrain_launcher.errors import LaunchError
from drivetrain_launcher.plan.host_detection import Host
from drivetrain_launcher.plan.launch_plan import LaunchTarget
from drivetrain_launcher.plan.launch_planner import plan_launch
from drivetrain_launcher.plan.resolved_launch import ResolvedLaunch
from drivetrain_launcher.submit.launch_line import plan_launch_line
from drivetrain_launcher.submit.named_values import read_options
from drivetrain_launcher.submit.submit_arguments import SubmitArguments

_DEFAULT_LOG_DIR = Path("logs")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedJob:
    """A request to the cluster, and the decisions made by default, each a sentence."""

    request: JobRequest
    notes: tuple[str, ...]


def plan_job(
    arguments: SubmitArguments, resolved: ResolvedLaunch, variables: Mapping[str, str], *, folder: Path
) -> PlannedJob:
    """Plan the request of a job with the user's variables that runs in `folder`, an absolute path.

    A LaunchError says that arguments contradict each other, or that the launch would fail on every node.
    """
    processes, accelerators, notes = _plan_devices(arguments, resolved)
    if arguments.memory_per_node is not None:
        memory_bytes(arguments.memory_per_node)
    _check_launch(arguments, resolved, processes, accelerators)
    time_limit, shutdown_timeout = _limits(arguments, resolved)
    line = plan_launch_line(
        resolved.layers,
        (arguments.script, *arguments.arguments),
        processes_per_node=processes,
        shutdown_timeout_seconds=shutdown_timeout,
    )
    for name, value in variables.items():
        if (said := line.environment.get(name, value)) != value:
            raise LaunchError(
                f"--env {name}={value}: contradicts {name}={said}, which a setting here says for the job; keep one"
            )
    request = JobRequest(
        name=Path(arguments.script).stem if arguments.name is None else arguments.name,
        command=line.command,
        folder=folder,
        num_nodes=resolved.launch.num_nodes,
        processes_per_node=processes,
        accelerators_per_node=accelerators,
        cpus_per_node=arguments.cpus_per_node,
        memory_per_node=arguments.memory_per_node,
        time_limit_seconds=time_limit,
        save_seconds=arguments.save_seconds,
        max_requeues=arguments.max_requeues,
        # The job runs in another folder, and is followed from a third.
        log_dir=(resolved.launch.log_dir or _DEFAULT_LOG_DIR).absolute(),
        device=resolved.device,
        mixed_precision=resolved.mixed_precision,
        environment={**line.environment, **variables},
        options=read_options(arguments.option),
    )
    texts = [request.name, *request.command, *request.environment.values(), *request.options.values()]
    for text in (*texts, str(request.folder), str(request.log_dir)):
        if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
            raise LaunchError(
                f"{text!r}: has a NUL character or is not UTF-8; a job cannot be given such an argument"
            )
    secrets = (
        f"{name} is secret and is not handed to the job; set it on the nodes by the cluster's own means"
        for name in line.withheld
    )
    return PlannedJob(request=request, notes=(*notes, *secrets))


def _plan_devices(
    arguments: SubmitArguments, resolved: ResolvedLaunch
) -> tuple[int | None, int, tuple[str, ...]]:
    """Return the processes and accelerators of each node, and the decisions made."""
    launch, device, asked = resolved.launch, resolved.device, arguments.accelerators_per_node
    processes = launch.processes_per_node
    if processes is None and launch.num_processes is not None:
        processes = launch.num_processes // launch.num_nodes
    if device == "cpu":
        if asked:
            raise LaunchError(
                f"--accelerators-per-node {asked}: the run is for the CPU (--cpu, or state.device cpu), which uses "
                "none; leave out one of the two"
            )
        return processes, 0, ()
    if asked == 0 and device != "auto":
        raise LaunchError(
            f"--accelerators-per-node 0: the run is for {device} (state.device); say how many it needs, or leave out "
            "one of the two"
        )
    if asked and processes is not None and processes > asked:
        raise LaunchError(
            f"{processes} processes on each node, but --accelerators-per-node {asked}: say the same number, or --cpu "
            "to train on the CPU"
        )
    if asked is not None:
        return processes, asked, ()
    if processes is not None:
        note = f"{processes} accelerators on each node, one a process; --accelerators-per-node sets another number"
        return processes, processes, (note,)
    return None, 0, ("no accelerator is requested; --accelerators-per-node N requests N on each node",)


def _check_launch(
    arguments: SubmitArguments, resolved: ResolvedLaunch, processes: int | None, accelerators: int
) -> None:
    """Plan the launch of node 0 as the node will, so that errors of every node are reported here."""
    launch = resolved.launch
    several = launch.num_nodes > 1
    of_node = replace(
        launch,
        num_processes=None,
        processes_per_node=processes,
        node_rank=0 if several and launch.rdzv_backend == "static" else None,
        master_addr="node-0" if several else None,
        rdzv_id=launch.rdzv_id or "job",
    )
    target = LaunchTarget(name=arguments.script, arguments=arguments.arguments, kind=launch.target_kind)
    kind = None if accelerators == 0 else "cuda" if resolved.device == "auto" else resolved.device
    try:
        plan_launch(of_node, target, Host(accelerator=kind, accelerator_count=accelerators))
    except LaunchError as error:
        raise LaunchError(f"the launch would fail on every node of the job: {error}") from error


def _limits(arguments: SubmitArguments, resolved: ResolvedLaunch) -> tuple[int | None, float]:
    """Return the time limit of the job, None for the cluster's default, and its ranks' time to save, in seconds."""
    time_limit, save_seconds = None, arguments.save_seconds
    if arguments.time is not None:
        time_limit = duration_seconds(arguments.time)
        if time_limit <= save_seconds:
            raise LaunchError(
                f"--time {arguments.time}: leaves no time to train before the last --save-seconds {save_seconds}; "
                "say a longer time, or fewer seconds to save"
            )
    source = resolved.sections["launch"].sources["shutdown_timeout_seconds"]
    if source.kind == "default":  # ranks may take all that the cluster gives
        return time_limit, save_seconds
    timeout = resolved.launch.shutdown_timeout_seconds
    if timeout > save_seconds:
        raise LaunchError(
            f"shutdown_timeout_seconds={timeout:g} from {source}: the cluster kills the job after --save-seconds "
            f"{save_seconds}; set --save-seconds to at least {timeout:g}"
        )
    return time_limit, timeout


_SECONDS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_PARTS = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", re.ASCII | re.IGNORECASE)
_CLOCK = re.compile(r"(?:(\d+)-)?(\d+):([0-5]\d):([0-5]\d)", re.ASCII)


def duration_seconds(text: str) -> int:
    """Return the number of seconds of a text such as "12:00:00", "1-12:00:00" (with days), "90m" or "1d12h".

    A number alone is refused, since clusters differ on its unit.
    """
    stripped = text.strip()
    form = _CLOCK.fullmatch(stripped) or _PARTS.fullmatch(stripped)
    seconds = 0
    if form is not None:
        seconds = sum(
            int(count or 0) * unit for count, unit in zip(form.groups(), _SECONDS.values(), strict=True)
        )
    if seconds < 1:
        raise LaunchError(
            f"time {text!r}: say hours, minutes and seconds, 12:00:00, or units, 90m, 12h or 1d12h"
        )
    return seconds
