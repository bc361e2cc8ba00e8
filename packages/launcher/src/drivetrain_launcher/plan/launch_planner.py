"""Build a launch plan from settings and a description of the host.

All functions are pure, so that a plan for ten thousand ranks can be built and read on a laptop.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

from drivetrain_clusters.protocol import JobPlacement
from drivetrain_launcher.errors import LaunchError
from drivetrain_launcher.plan.host_detection import VISIBILITY_VARIABLES, Host
from drivetrain_launcher.plan.launch_plan import LaunchPlan, LaunchTarget
from drivetrain_launcher.plan.tpu_host import TpuHost, tpu_environment
from drivetrain_launcher.settings import DEFAULT_PORT, LaunchSettings
from drivetrain_state.device_traits import traits_of

if TYPE_CHECKING:
    from drivetrain_launcher.plan.core_binding import CoreBinding


def plan_launch(
    settings: LaunchSettings,
    target: LaunchTarget,
    host: Host,
    *,
    handed_down: str | None = None,
    placement: JobPlacement | None = None,
) -> LaunchPlan:
    """Plan a launch on this node, which `host` describes.

    `handed_down` are the settings for the workers, as `Layers.to_json` writes them; `placement` is the place of this
    process in a cluster's job, whose values the settings already hold. A LaunchError says why a launch is impossible,
    such as with too few accelerators or without a node rank, with the numbers and a remedy.
    """
    task = placement if placement is not None and placement.is_one_task_per_rank else None
    count, notes = _processes_per_node(settings, host) if task is None else (task.tasks_per_node, ())
    _check_flags(settings, target, count * settings.num_nodes)
    needs_agent = task is None and (
        count > 1
        or settings.num_nodes > 1
        or settings.max_restarts > 0
        or settings.log_dir is not None
        or settings.prefix == "all"
        or bool(settings.show_ranks)
        or bool(settings.tail)
    )
    if settings.preload and not needs_agent:
        shown = ",".join(settings.preload)
        notes += (f"--preload {shown}: a single process imports by itself; nothing is forked",)
    environment = {} if handed_down is None else {"DRIVETRAIN_CONFIG": handed_down}
    plan = LaunchPlan(
        mode="elastic" if needs_agent else "in place",
        target=target,
        processes_per_node=count,
        max_restarts=settings.max_restarts,
        monitor_interval_seconds=settings.monitor_interval_seconds,
        shutdown_timeout_seconds=settings.shutdown_timeout_seconds,
        preload=settings.preload,
        log_dir=settings.log_dir,
        prefix=settings.prefix,
        show_ranks=settings.show_ranks,
        tail=settings.tail,
        environment={**environment, **_visible(settings, host)},
        placement=placement,
        max_requeues=settings.max_requeues,
        notes=notes,
    )
    if task is not None:
        plan = _place_task(plan, settings, task, host)
    elif needs_agent:
        plan = _place_meeting(plan, settings)
    elif host.num_ranks > 1 and settings.num_processes is not None:
        raise LaunchError(
            f"--num-processes {settings.num_processes}: another launcher has started this process as one of "
            f"WORLD_SIZE={host.num_ranks} ranks; leave out --num-processes to keep them, or take RANK, "
            "LOCAL_RANK and WORLD_SIZE out of the environment to run alone"
        )
    else:
        plan = replace(plan, has_ranks=host.num_ranks > 0, master_port=settings.master_port or 0)
    if host.tpus is not None:
        plan = _place_on_tpus(plan, host.tpus)
    return _divide_cores(plan, settings, host)


def _place_on_tpus(plan: LaunchPlan, tpus: TpuHost) -> LaunchPlan:
    """Return the plan with what torch_tpu reads in each process."""
    if plan.preload and plan.mode == "elastic":
        raise LaunchError(
            f"--preload {','.join(plan.preload)}: a forked process cannot use a TPU; leave it out"
        )
    hosts = () if plan.placement is None else plan.placement.hosts
    of_tpus = tpu_environment(
        tpus, num_processes=plan.processes_per_node, num_nodes=plan.num_nodes, hosts=hosts
    )
    return replace(plan, environment={**plan.environment, **of_tpus})


def _place_task(plan: LaunchPlan, settings: LaunchSettings, place: JobPlacement, host: Host) -> LaunchPlan:
    """Return the plan of a task that the cluster started as one rank."""
    if settings.master_addr is None and place.num_nodes > 1:
        _check_address(place)
    environment = dict(plan.environment)
    if host.accelerator is not None and place.devices is not None and len(place.devices) == 1:
        # The task sees its own accelerator alone, as the first, whatever its local rank.
        environment["DRIVETRAIN_STATE__DEVICE"] = f"{host.accelerator}:0"
    return replace(
        plan,
        num_nodes=place.num_nodes,
        node_rank=place.node_rank,
        rdzv_id=settings.rdzv_id or place.job_id,
        master_addr=settings.master_addr or ("127.0.0.1" if place.num_nodes == 1 else place.master_addr),
        master_port=settings.master_port or place.master_port,
        environment=environment,
    )


def _check_address(place: JobPlacement) -> None:
    if not place.master_addr:
        raise LaunchError(
            f"{place.cluster}: nothing tells the {place.num_nodes} nodes ({place.source('num_nodes')}) where node 0 "
            "is: say --master-addr HOST, the host of rank 0, or set MASTER_ADDR for all ranks (mpirun -x "
            "MASTER_ADDR=HOST, mpiexec -genv MASTER_ADDR HOST)"
        )


def _check_flags(settings: LaunchSettings, target: LaunchTarget, world_size: int) -> None:
    """Refuse flags that contradict each other or the target."""
    if settings.preload and target.kind == "program":
        raise LaunchError(
            f"--preload {','.join(settings.preload)}: {target.name} is started without Python; leave out --preload "
            "or --program"
        )
    if settings.tail and settings.prefix == "none":
        raise LaunchError(
            f"--tail {settings.tail}: with --prefix none the launcher does not see the output; leave one of them out"
        )
    missing = [rank for rank in settings.show_ranks if rank >= world_size]
    if missing:
        raise LaunchError(
            f"--show-ranks {','.join(map(str, settings.show_ranks))}: {world_size} processes have the ranks 0 to "
            f"{world_size - 1}; there is no {', '.join(map(str, missing))}"
        )


def _processes_per_node(settings: LaunchSettings, host: Host) -> tuple[int, tuple[str, ...]]:
    """Return the number of processes on this node, and a note if it was not set."""
    available = len(settings.devices) if settings.devices else host.accelerator_count
    what = f"{host.accelerator} device{'s' if available != 1 else ''}"
    if host.accelerator is not None and available == 0:
        raise LaunchError(
            f"this node has no {host.accelerator} device that torch can use: {traits_of(host.accelerator).remedy}"
            "say --cpu to train on the CPU, or do not set the kind of device"
        )
    asked = settings.processes_per_node
    if asked is None and settings.num_processes is not None:
        asked = settings.num_processes // settings.num_nodes
    if asked is None:
        count = max(1, available)
        note = f"{count} processes, one for each of {available} {what}; --num-processes sets another number"
        return count, (note,) if count > 1 else ()
    if host.accelerator is not None and asked > available:
        raise LaunchError(
            f"{asked} processes on this node, but it has {available} {what} to give them: say "
            f"--num-processes {available * settings.num_nodes}, or --cpu to train on the CPU"
        )
    return asked, ()


def _visible(settings: LaunchSettings, host: Host) -> dict[str, str]:
    """Return the environment variable that restricts the visible accelerators, if any."""
    if not settings.devices:
        return {}
    shown = ",".join(map(str, settings.devices))
    if host.accelerator is None:
        raise LaunchError(f"--devices {shown}: this node has no accelerator that torch can use; leave it out")
    if host.accelerator not in VISIBILITY_VARIABLES:
        raise LaunchError(f"--devices {shown}: {host.accelerator} devices cannot be chosen; leave it out")
    missing = [d for d in settings.devices if isinstance(d, int) and not 0 <= d < host.accelerator_count]
    if missing and host.visible_devices is None:
        raise LaunchError(
            f"--devices {shown}: this node has {host.accelerator_count} {host.accelerator} devices, counted from 0; "
            f"there is no {', '.join(map(str, missing))}"
        )
    if len(set(settings.devices)) < len(settings.devices):
        raise LaunchError(f"--devices {shown}: names a device twice")
    return {VISIBILITY_VARIABLES[host.accelerator]: shown}


def _divide_cores(plan: LaunchPlan, settings: LaunchSettings, host: Host) -> LaunchPlan:
    """Return the plan with the number of threads of each rank, and with its cores if ranks are to be bound."""
    topology = host.cpu_topology
    count, notes = plan.processes_per_node, list(plan.notes)
    bindings: tuple[CoreBinding, ...] = ()
    if topology is not None and plan.placement is not None and plan.is_cluster_task and topology.is_bound:
        notes.append(
            f"--bind auto: {plan.placement.cluster} lets this task use {len(topology.cores)} cores of the machine; "
            "it keeps them"
        )
    elif topology is not None:
        from drivetrain_launcher.plan.core_binding import plan_bindings, unused_cores  # few launches bind

        if len(topology.device_nodes) < count:  # each task of a cluster sees its own device alone
            topology = replace(topology, device_nodes=())
        bindings = plan_bindings(topology, count)
        if count > len(topology.cores):
            notes.append(f"--bind auto: {count} ranks share {len(topology.cores)} cores")
        for node, num_cores in unused_cores(topology, bindings).items():
            notes.append(
                f"--bind auto: no rank is near NUMA node {node}, whose {num_cores} cores stay unused"
            )
        if host.accelerator is not None and not all(binding.is_near_device for binding in bindings):
            notes.append(
                f"--bind auto: the system does not tell near which cores each {host.accelerator} device is; ranks "
                "whose device is unknown share the cores of the nodes evenly"
            )
    threads = settings.threads_per_process
    if threads is None and host.omp_num_threads is None and (count > 1 or bindings):
        threads, why = 1, "so that they do not crowd the CPU"
        if bindings:
            threads = min(binding.num_cores for binding in bindings)
            why = "the fewest cores that one has" if count > 1 else "its cores"
            quota = None if topology is None else topology.quota
            if quota is not None and quota < threads * count:
                threads, why = max(1, int(quota / count)), "as the control group's quota allows"
        who = f"each of {count} processes" if count > 1 else "the process"
        notes.append(f"OMP_NUM_THREADS={threads} for {who}, {why}; --threads-per-process sets another number")
    omp = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    return replace(plan, bindings=bindings, environment={**plan.environment, **omp}, notes=tuple(notes))


def _place_meeting(plan: LaunchPlan, settings: LaunchSettings) -> LaunchPlan:
    """Return the plan with the rendezvous of its nodes."""
    if settings.num_nodes == 1:
        return replace(
            plan,
            rdzv_id=settings.rdzv_id or "none",
            master_addr=settings.master_addr or "127.0.0.1",
            master_port=settings.master_port or 0,
        )
    _check_meeting(plan, settings)
    return replace(
        plan,
        num_nodes=settings.num_nodes,
        min_nodes=settings.min_nodes,
        node_silence_seconds=settings.node_silence_seconds,
        node_rank=settings.node_rank,
        rdzv_backend=settings.rdzv_backend,
        rdzv_id=settings.rdzv_id or "none",
        rdzv_timeout_seconds=settings.rdzv_timeout_seconds,
        master_addr=settings.master_addr or "",
        master_port=settings.master_port or DEFAULT_PORT,
    )


def _check_meeting(plan: LaunchPlan, settings: LaunchSettings) -> None:
    """Refuse settings with which several nodes cannot meet."""
    is_static = settings.rdzv_backend == "static"
    needs_rank = is_static and settings.node_rank is None
    if settings.min_nodes is not None and settings.rdzv_backend != "c10d":
        raise LaunchError(
            f"--num-nodes {settings.min_nodes}:{settings.num_nodes}: nodes come and go only with --rdzv-backend c10d "
            "--rdzv-id NAME --master-addr HOST; say the three on every node, or a single number"
        )
    if settings.master_addr is None and plan.placement is not None:
        _check_address(plan.placement)
    if settings.master_addr is None:
        raise LaunchError(
            f"--num-nodes {settings.num_nodes}: say on every node where they meet, --master-addr HOST (a name or "
            "address of the node with rank 0)"
            + (f", and which it is, --node-rank 0 to {settings.num_nodes - 1}" if needs_rank else "")
        )
    if settings.master_port == 0:
        raise LaunchError(
            f"--master-port 0: {settings.num_nodes} nodes must be told the same port; say one, or leave it out for "
            f"{DEFAULT_PORT}"
        )
    if needs_rank:
        raise LaunchError(
            f"--num-nodes {settings.num_nodes}: say on each node which it is, --node-rank 0 to "
            f"{settings.num_nodes - 1}; or use --rdzv-backend c10d, where they agree on their ranks"
        )
    if is_static and settings.max_restarts:
        raise LaunchError(
            f"--max-restarts {settings.max_restarts}: several nodes restart together only with --rdzv-backend c10d"
        )
    if not is_static and settings.rdzv_id is None:
        raise LaunchError(
            "--rdzv-backend c10d: say on every node the same --rdzv-id NAME, so that runs do not mix"
        )
    if not is_static and settings.node_rank is not None:
        raise LaunchError(
            "--node-rank: with --rdzv-backend c10d the nodes agree on their ranks; leave it out"
        )
