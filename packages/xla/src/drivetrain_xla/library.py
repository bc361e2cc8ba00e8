"""The torch-xla library: imported on demand, with the devices of this process and a cache of compiled graphs."""

import importlib
import logging
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch

from drivetrain_backends.errors import BackendNotInstalledError
from drivetrain_config import environ
from drivetrain_state import Context
from drivetrain_xla.compat import cache_is_open, devices_are_chosen
from drivetrain_xla.settings import Spmd

logger = logging.getLogger(__name__)

TORCH = "2.9"  # the only torch that torch-xla 2.9, its last version, works with
AXIS = "fsdp"  # the name of the only mesh axis, as SpmdFullyShardedDataParallel wants it


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """torch-xla's modules, and how this run uses its devices.

    Attributes:
        torch_xla: The package of that name.
        spmd: The module `torch_xla.distributed.spmd`, whose `mark_sharding` cuts tensors.
        fully_sharded: The class `SpmdFullyShardedDataParallel`.
        metrics: The module `torch_xla.debug.metrics`, which counts compilations.
        mode: The division of the work over devices, as the setting `spmd` names it.
        mesh: The mesh of all devices of this process; None if one device trains.
        num_devices: The number of devices that train.
        cache: The folder of compiled graphs; None without one.
    """

    torch_xla: Any
    spmd: Any
    fully_sharded: Any
    metrics: Any
    mode: Literal["off", "data", "shard"]
    mesh: Any
    num_devices: int
    cache: Path | None


def load_library(context: Context, spmd: Spmd | None, cache_dir: Path | None) -> Library:
    """Import torch-xla, begin SPMD if the settings ask for it, and open the cache of compiled graphs.

    Raises:
        BackendNotInstalledError: torch-xla is missing, does not fit torch, or the run's device is not XLA's.
        RuntimeError: SPMD cannot begin or end in this process any more.
    """
    check_installed()
    if context.device.type != "xla":
        raise BackendNotInstalledError(
            f"backend='xla' on device {context.device.type!r}: say --state-device xla, or "
            'sections={"state": {"device": "xla"}}; on a machine without a TPU also PJRT_DEVICE=CPU, under which XLA '
            "computes on the processor"
        )
    if context.topology.world_size > 1:
        raise RuntimeError(
            f"backend='xla' in {context.topology.world_size} processes: one process drives all devices, by SPMD; "
            "launch with --num-processes 1"
        )
    torch_xla, runtime = importlib.import_module("torch_xla"), importlib.import_module("torch_xla.runtime")
    # Not `addressable_device_count`, after which SPMD cannot begin.
    count = int(runtime.addressable_runtime_device_count())
    mode = ("data" if count > 1 else "off") if spmd is None else spmd
    _enter_mode(torch_xla, runtime, mode, count)
    cache = None if cache_dir is None else _open_cache(torch_xla, runtime, cache_dir)
    _begin(torch_xla, context.device)
    sharding = importlib.import_module("torch_xla.distributed.spmd")
    wrapping = importlib.import_module("torch_xla.experimental.spmd_fully_sharded_data_parallel")
    return Library(
        torch_xla=torch_xla,
        spmd=sharding,
        fully_sharded=wrapping.SpmdFullyShardedDataParallel,
        metrics=importlib.import_module("torch_xla.debug.metrics"),
        mode=mode,
        mesh=None if mode == "off" else sharding.get_1d_mesh(AXIS),
        num_devices=1 if mode == "off" else count,
        cache=cache,
    )


def _enter_mode(torch_xla: Any, runtime: Any, mode: Spmd, count: int) -> None:
    """Begin SPMD, or see that it has not begun; a process stays in the one or the other."""
    if mode != "off" and not runtime.is_spmd():
        if devices_are_chosen(torch_xla):
            raise RuntimeError(
                f"xla.spmd={mode!r}: a tensor was made on an XLA device before, after which SPMD cannot begin; make "
                "the Accelerator before any tensor on XLA, or say xla.spmd=off"
            )
        runtime.use_spmd()
    if mode == "off" and runtime.is_spmd():
        raise RuntimeError(
            "xla.spmd='off': SPMD has begun in this process, and does not end before the process does; say "
            "xla.spmd=data or shard, or start another process"
        )
    if mode == "off" and count > 1:
        logger.warning("xla.spmd=off: of %d devices one trains; xla.spmd=data uses all", count)


def check_installed() -> None:
    """Raise BackendNotInstalledError unless torch-xla and the torch that it works with are installed."""
    if find_spec("torch_xla") is None:
        raise BackendNotInstalledError(
            "backend='xla': the package torch-xla is not installed. It works with torch "
            f"{TORCH} alone: pip install 'torch=={TORCH}.*' 'torch-xla=={TORCH}.*', in an environment of its own"
        )
    if not torch.__version__.startswith(f"{TORCH}."):
        raise BackendNotInstalledError(
            f"backend='xla': torch-xla works with torch {TORCH} alone, and this is torch {torch.__version__}: "
            f"pip install 'torch=={TORCH}.*' 'torch-xla=={TORCH}.*', in an environment of its own"
        )


def _begin(torch_xla: Any, device: torch.device) -> None:
    """Make the first tensor on XLA, whose generator begins with torch's seed, as those of other devices do.

    Autograd has a thread for each device that there was at the first backward of the process.
    """
    if not devices_are_chosen(torch_xla):
        torch_xla.manual_seed(torch.initial_seed() % 2**63)
    try:
        torch.ones((), device=device, requires_grad=True).backward()
    except RuntimeError as error:
        raise RuntimeError(
            "backend='xla': a backward has run in this process before its first tensor on XLA, and autograd knows no "
            "XLA device any more: make the Accelerator before any backward, or a tensor on XLA"
        ) from error


def _open_cache(torch_xla: Any, runtime: Any, folder: Path) -> Path | None:
    """Keep compiled graphs in a folder, and load those of earlier runs. Once in a process, before any tensor on XLA.

    Returns:
        The folder of this process's cache: another one if it was opened before; None if it is too late for one.
    """
    path, opened = str(folder.absolute()), environ.read("XLA_PERSISTENT_CACHE_PATH")
    if opened is None and not cache_is_open(torch_xla):
        folder.mkdir(parents=True, exist_ok=True)
        runtime.initialize_cache(path)
        return folder
    if opened != path:
        what = f"a cache in {opened} is open" if opened is not None else "a tensor was made on XLA before"
        logger.warning(
            "xla.cache_dir=%s: %s in this process, so compiled graphs are not kept there", folder, what
        )
    return None if opened is None else Path(opened)
