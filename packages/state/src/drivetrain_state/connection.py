"""Find this process's ranks and device, and connect the ranks: adopt a suitable process group or create one."""

import atexit
import multiprocessing
import os
import sys
from contextlib import ExitStack
from dataclasses import fields, replace
from datetime import timedelta
from functools import cache
from logging import getLogger
from socket import gethostname, if_nameindex
from time import sleep
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed import Store
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from drivetrain_config import environ, resolve
from drivetrain_config.environ import RankEnvironment
from drivetrain_state.collectives.seed import deterministic_algorithms
from drivetrain_state.context import Context
from drivetrain_state.detect import best_device_kind, device_count
from drivetrain_state.device_traits import traits_of
from drivetrain_state.errors import ConnectError, DeviceError, GroupMismatchError
from drivetrain_state.hang.progress_record import ProgressRecord
from drivetrain_state.mesh import MeshPlan, ParallelDims
from drivetrain_state.own_addresses import is_loopback
from drivetrain_state.settings import DeviceChoice, StateSettings
from drivetrain_state.store_setup import meet
from drivetrain_state.topology import Topology, topology_from_hosts

_LETTING_GO_SECONDS = 0.02

logger = getLogger(__name__)


def connect(
    settings: StateSettings | None = None,
    *,
    device: str | torch.device | None = None,
    parallelism: ParallelDims | None = None,
    needs_group: bool = False,
) -> Context:
    """Connect this process to the other ranks, and return its ranks, device and mesh. Must be called on all ranks.

    An existing torch process group is adopted if it is suitable; rank 0 warns of an unusual backend, such as gloo for
    CUDA. Otherwise one is created from the launcher's environment variables, and the context owns it: `close`, or the
    end of the process, destroys the group. A single process gets no group, unless `parallelism` requires a mesh or
    `needs_group` is set.

    Args:
        settings: The `state` section; None reads it from the command line, environment and file.
        device: The device, which overrides `settings.device`. With an index, such as `"cuda:1"`, exactly that
            device; without one, the device of this process's local rank.
        parallelism: The sizes of the parallel dimensions; None creates no mesh.
        needs_group: Whether a single process gets a group too, as sharding backends require.

    Raises:
        DeviceError: If there is no such device, or the node has fewer devices than processes.
        GroupMismatchError: If the existing group has another world size or rank, or no backend for the device.
        ConnectError: If the ranks cannot connect, or torch has no collectives for the device.

    Example:
        >>> context = connect(StateSettings(device="cpu"))
        >>> context.topology.world_size, context.device
        (1, device(type='cpu'))
        >>> context.close()
    """
    # torch cannot parse kinds whose library is not loaded.
    kind, _, number = ("" if device is None else str(device)).partition(":")
    if number and not number.isdecimal():
        raise DeviceError(
            f"device={str(device)!r}: say a kind such as 'cuda', or one device such as 'cuda:1'"
        )
    if settings is None:
        settings = resolve(StateSettings, section="state", code={"device": kind or None}).value
    elif kind:
        settings = replace(settings, device=cast("DeviceChoice", kind))
    if settings.device == "auto":
        settings = replace(settings, device=cast("DeviceChoice", best_device_kind()))
    launched = _read_own_ranks()
    if dist.is_initialized():
        _check_group(settings.device)
    topology = _find_topology(launched)
    place = _choose_device(settings.device, int(number) if number else None, topology)
    plan = parallelism.plan(topology.world_size) if parallelism is not None else None
    with ExitStack() as undo:
        needs_group = needs_group or plan is not None
        owns_group = _join(place, topology, launched, settings, needs_group=needs_group, undo=undo)
        progress = ProgressRecord()
        if settings.watchdog and topology.world_size > 1:
            from drivetrain_state.hang.watchdog import start_watchdog  # not needed by a single process

            reports = settings.hang_report_directory
            undo.callback(start_watchdog(topology, settings, progress, report_directory=reports).stop)
        if settings.deterministic:
            undo.enter_context(deterministic_algorithms())
        return Context(
            topology=topology,
            device=place,
            mesh=build_mesh(plan, place.type) if plan is not None else None,
            plan=plan,
            parallelism=parallelism,
            settings=settings,
            progress=progress,
            owns_group=owns_group,
            _has_group=dist.is_initialized(),
            _on_close=undo.pop_all(),
        )


def build_mesh(plan: MeshPlan, device_type: str) -> DeviceMesh:
    """Create the device mesh of `plan` over the default process group. Must be called on all ranks."""
    return init_device_mesh(device_type, plan.sizes, mesh_dim_names=plan.names)


def _read_own_ranks() -> RankEnvironment | None:
    """Return the launcher's ranks for this process; ConnectError if the process inherited them from a rank."""
    if (owner := environ.inherited_from()) is None:
        launched = environ.launched()
        environ.own_rank()
        return launched
    remedy = (
        "where that only starts others, launch it as `--program python SCRIPT`; to run this one alone, start it "
        "with `drivetrain launch --num-processes 1 SCRIPT`, or without these variables: "
        "env -u RANK -u LOCAL_RANK -u WORLD_SIZE PROGRAM"
    )
    if multiprocessing.parent_process() is not None:
        remedy = (
            "a worker process of multiprocessing cannot connect, so keep this call out of it, in a script by "
            "`if __name__ == '__main__':`"
        )
    raise ConnectError(
        f"this process ({os.getpid()}) inherited RANK={environ.read('RANK')} and WORLD_SIZE="
        f"{environ.read('WORLD_SIZE')} from process {owner}, which is that rank, and cannot be it too: {remedy}"
    )


def _find_topology(launched: RankEnvironment | None) -> Topology:
    """Return the ranks from the existing group and the launcher, which must agree if both exist."""
    if launched is None and dist.is_initialized():  # a group created without a launcher
        hosts: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(hosts, gethostname())
        return topology_from_hosts([str(host) for host in hosts], dist.get_rank())
    if launched is None:
        return Topology()
    if dist.is_initialized():
        for name, of_group, of_launcher in (
            ("world size", dist.get_world_size(), launched.world_size),
            ("rank", dist.get_rank(), launched.rank),
        ):
            if of_group != of_launcher:
                raise GroupMismatchError(
                    f"the process group that exists has {name} {of_group}, but the launcher's variables say "
                    f"{of_launcher}: let connect() create the group, or create it with the launcher's ranks"
                )
    return Topology(**{each.name: getattr(launched, each.name) for each in fields(Topology)})


def _choose_device(kind: str, index: int | None, topology: Topology) -> torch.device:
    """Return this process's device; check that it exists, and make it torch's current device."""
    if kind == "cpu":
        return torch.device("cpu")
    count = device_count(kind)
    if count == 0:
        how = f"{traits_of(kind).remedy}say device='cpu' or 'auto'"
        raise DeviceError(f"device={kind!r}: this machine has none that torch can use; {how}")
    chosen = topology.local_rank if index is None else index
    if chosen >= count:
        raise DeviceError(
            f"{kind}:{chosen} was wanted for local rank {topology.local_rank} of {topology.local_world_size}, but "
            f"this process sees {count} {kind} device{'s' if count > 1 else ''}: start at most {count} processes a "
            f"node, or say device='cpu'; where each process sees only its own device, say device='{kind}:0'"
        )
    if kind == "mps":
        return torch.device("mps")
    if kind == "tpu":  # its runtime has bound this process to one of them
        return torch.device(kind, torch.accelerator.current_device_index())
    if kind != "xla":
        torch.accelerator.set_device_index(chosen)
    return torch.device(kind, chosen)


def _join(
    place: torch.device,
    topology: Topology,
    launched: RankEnvironment | None,
    settings: StateSettings,
    *,
    needs_group: bool,
    undo: ExitStack,
) -> bool:
    """Adopt the process group, or create a group if needed; return whether a group was created."""
    if dist.is_initialized() or (topology.world_size == 1 and not needs_group):
        return False
    backend = group_backend(place.type)
    store: Store = dist.HashStore()
    if topology.world_size > 1 and launched is not None:
        interfaces = {name for _, name in if_nameindex()} & {"lo", "lo0"}
        if is_loopback(launched.master_addr) and interfaces and environ.read("GLOO_SOCKET_IFNAME") is None:
            # Gloo listens on loopback alone, where the ranks meet, unless the user names an interface. No `exported`:
            # its block would end with the interpreter, in a program that never closes the context.
            environ.put(GLOO_SOCKET_IFNAME=interfaces.pop())
            undo.callback(environ.put, GLOO_SOCKET_IFNAME=None)
        store = meet(launched, timeout_seconds=settings.timeout_seconds)
    try:
        dist.init_process_group(
            backend,
            store=store,
            rank=topology.rank,
            world_size=topology.world_size,
            timeout=timedelta(seconds=settings.timeout_seconds),
            device_id=place if place.type == "cuda" else None,
        )
    except (dist.DistStoreError, dist.DistNetworkError) as error:
        raise ConnectError(
            f"rank {topology.rank} met all of {topology.world_size} ranks, but they did not connect to each other "
            f"within {settings.timeout_seconds:.0f} s: one of them has ended meanwhile, and its output says why"
        ) from error
    atexit.register(_leave_at_exit)
    undo.callback(_leave)
    return True


def group_backend(kind: str) -> str:
    """Return the backends of a process group for a kind of device, such as `"cpu:gloo,cuda:nccl"`.

    Raises:
        ConnectError: If torch has no collectives for this kind of device.
    """
    if (found := traits_of(kind).collectives) is None:
        raise ConnectError(
            f"device={kind!r} has no collectives between processes: start one process, or say device='cpu'"
        )
    return "gloo" if kind == "cpu" else f"cpu:gloo,{kind}:{found}"


def _check_group(kind: str) -> None:
    """Raise GroupMismatchError if the group has no backend for a kind of device; warn of an unusual backend."""
    usual = traits_of(kind).collectives
    if dist.get_world_size() == 1 and usual is None:
        return
    ours, existing = group_backend(kind), str(dist.get_backend_config())
    found = dict(part.split(":") for part in existing.split(",")).get(kind)
    if found is None:
        raise GroupMismatchError(
            f"device={kind!r} needs a process group with '{kind}:{usual}', but the one that exists has {existing!r}: "
            f"create it with init_process_group({ours!r}), let connect() create it, or choose a device it supports"
        )
    if found != usual and dist.get_rank() == 0:
        _warn_of_unusual_backend(kind, found)


@cache  # one line, however many contexts adopt the group
def _warn_of_unusual_backend(kind: str, found: str) -> None:
    logger.warning(
        "the process group that exists moves %s tensors through %s%s: for %s, create it with "
        "init_process_group(%r), or let connect() create it",
        kind,
        found,
        ", which copies them through host memory" if found == "gloo" else "",
        traits_of(kind).collectives,
        group_backend(kind),
    )


def _leave() -> None:
    atexit.unregister(_leave_at_exit)
    if dist.is_initialized():
        dist.destroy_process_group()
        # A gloo thread drops its tensors shortly after an operation ends. If it holds the last reference to one, it
        # needs the interpreter to free it, and aborts the process if the interpreter is shutting down.
        sleep(_LETTING_GO_SECONDS)


def _leave_at_exit() -> None:
    """Destroy a group that was never closed: its threads would outlive the interpreter and abort the process."""
    # A failing process keeps the group: destroying it may wait for ranks that wait for this one.
    if getattr(sys, "last_value", None) is None:
        _leave()
