"""The DeepSpeed library: imported on demand for the run's device, with the environment variables that it reads."""

import logging
import os
import sys
from collections.abc import Generator, Iterable
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec
from pathlib import Path
from threading import Event, Thread, get_ident
from types import ModuleType
from typing import Any

from torch import Tensor
from torch.utils.file_baton import FileBaton

from drivetrain_backends.errors import BackendNotInstalledError
from drivetrain_config import environ
from drivetrain_deepspeed.compat import drop_ended_groups
from drivetrain_state import Context, ProgressMark, barrier

_logger = logging.getLogger(__name__)
_LONGEST_COMPILATION = 600


def load_deepspeed(context: Context) -> ModuleType:
    """Import DeepSpeed for the device type of the context.

    Raises:
        BackendNotInstalledError: DeepSpeed is not installed, or was imported earlier for another device type.
    """
    if find_spec("deepspeed") is None:
        raise BackendNotInstalledError(
            "backend='deepspeed': the package deepspeed is not installed; it comes with "
            "pip install 'drivetrain[deepspeed]', or 'drivetrain-deepspeed[deepspeed]'"
        )
    with _variables(context):
        import deepspeed

        found = accelerator().device_name()
    if found != context.device.type:
        raise BackendNotInstalledError(
            f"backend='deepspeed' on device {context.device.type!r}: DeepSpeed was imported before, and serves "
            f"{found!r} in this process; leave importing it to prepare(), or set DS_ACCELERATOR={context.device.type}"
        )
    return deepspeed


def accelerator() -> Any:
    """Return DeepSpeed's interface to the device."""
    from deepspeed.accelerator import get_accelerator

    return get_accelerator()


@contextmanager
def entering(context: Context) -> Generator[None]:
    """Run the block with the process group and environment variables that DeepSpeed needs. Called on all ranks."""
    from deepspeed import comm

    drop_ended_groups()
    with _variables(context):
        if not comm.is_initialized():
            with telling_of_builds(context):
                comm.init_distributed(dist_init_required=False)
            _unlink_shared_memory(context)
        yield


def accumulates(parameters: Iterable[Tensor]) -> bool:
    """Return whether the running backward adds to gradients of the parameters; False in `torch.autograd.grad`."""
    from deepspeed.runtime.utils import count_used_parameters_in_backward

    trained: list[Any] = [parameter for parameter in parameters if parameter.requires_grad]
    try:
        return bool(count_used_parameters_in_backward(trained))
    except RuntimeError:  # a parameter is an input of `torch.autograd.grad`
        return False


def local_rank_known(context: Context) -> AbstractContextManager[None]:
    """Set LOCAL_RANK in the block: stage 3 reads it in every backward, and a single process lacks it."""
    return environ.exported(LOCAL_RANK=str(context.topology.local_rank))


def know_local_rank(engine: Any, context: Context) -> None:
    """Set LOCAL_RANK where an engine of stage 3 without an optimizer reads it: as a forward of the model begins."""
    coordinator = engine.optimizer.get_param_coordinator()
    reset = coordinator.reset_step

    def reset_step() -> None:
        with local_rank_known(context):
            reset()

    coordinator.reset_step = reset_step


def check_drives(asked: str) -> None:
    """Raise BackendNotInstalledError where DeepSpeed cannot compile what reads and writes drives; `asked` for it."""
    from deepspeed.ops import op_builder

    builders: Any = op_builder
    if not builders.AsyncIOBuilder().is_compatible(verbose=False):
        raise BackendNotInstalledError(
            f"{asked}: DeepSpeed reads and writes drives by libaio, which with its headers was not found: install "
            "libaio-dev (libaio-devel with yum or dnf), or name its folders in CFLAGS and LDFLAGS; or leave it out"
        )


def _variables(context: Context):
    topology = context.topology
    return environ.exported(
        DS_ACCELERATOR=context.device.type,
        RANK=str(topology.rank),
        LOCAL_RANK=str(topology.local_rank),
        WORLD_SIZE=str(topology.world_size),
        # Its sums over shared memory, in inference, crash the process where this was not set at the start.
        LOCAL_SIZE=str(topology.local_world_size),
    )


def _unlink_shared_memory(context: Context) -> None:
    """Remove the names of the buffers, 66 MiB each, that all ranks have mapped: DeepSpeed leaves them behind."""
    mapped = Path("/proc/self/maps")
    if context.device.type != "cpu" or not mapped.exists():
        return
    barrier(context)
    for line in mapped.read_text().splitlines():
        if "/deepspeed_allreduce_buffer_" in line:
            Path(line.split(maxsplit=5)[5]).unlink(missing_ok=True)


@contextmanager
def telling_of_builds(context: Context, *, every_seconds: float = 5) -> Generator[None]:
    """Report progress while the block compiles an operator; on the CPU, DeepSpeed compiles operators at first use.

    Reports stop after `_LONGEST_COMPILATION` seconds, or while the block waits for a lock that no process of this
    machine holds. A hang is then still detected.
    """
    done, thread_id = Event(), get_ident()

    def tell() -> None:
        told: str | None = None
        for _ in range(int(_LONGEST_COMPILATION / every_seconds)):
            if done.wait(every_seconds):
                return
            lock = _find_awaited_lock(thread_id)
            holders = [] if lock is None else _holders(lock)
            found = _describe_wait(lock, holders)
            if found != told and context.topology.local_rank == 0:
                _logger.warning(found)
            told = found
            if lock is None or holders:
                context.progress.mark(ProgressMark.COMPILE)

    thread = Thread(target=tell, name="drivetrain-deepspeed-start", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _find_awaited_lock(thread_id: int) -> str | None:
    """Return the lock file that a thread waits for, as torch's `FileBaton` does; None if it does not wait."""
    frame = sys._current_frames().get(thread_id)  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        if frame.f_code is FileBaton.wait.__code__:
            return frame.f_locals["self"].lock_file_path
        frame = frame.f_back
    return None


def _holders(lock: str) -> list[str]:
    """Return the processes of this machine that have a file open, as /proc lists them."""
    found: list[str] = []
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if os.readlink(link) == os.path.realpath(lock):
                command = (link.parents[1] / "cmdline").read_text().replace("\0", " ").strip()
                found.append(f"{link.parents[1].name} ({command[:80]})")
        except OSError:  # it ended meanwhile, or is another user's
            continue
    return found


def _describe_wait(lock: str | None, holders: list[str]) -> str:
    if lock is None:
        folder = environ.read("TORCH_EXTENSIONS_DIR") or "~/.cache/torch_extensions"
        return (
            "DeepSpeed compiles an operator for this machine, about a minute; once, for it is kept in "
            f"{folder} (TORCH_EXTENSIONS_DIR)"
        )
    if holders:
        return f"DeepSpeed waits for another build of its operator, by process {', '.join(holders)}: lock file {lock}"
    return (
        f"DeepSpeed waits for the lock file {lock}, which no process on this machine holds: it is of a build on "
        "another machine that shares the folder, or of one that was killed. If no such build runs, stop this run, "
        "delete the file and start again; TORCH_EXTENSIONS_DIR sets another folder"
    )
