"""The DeepSpeed library: imported on demand, for the device of the run, with the environment variables it reads."""

from collections.abc import Generator, Iterable
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch.distributed as dist
from torch import Tensor

from drivetrain_backends.deepspeed.build_progress import telling_of_builds
from drivetrain_backends.deepspeed.compat import drop_ended_groups
from drivetrain_backends.errors import BackendNotInstalledError
from drivetrain_config import environ
from drivetrain_state import Context


def load_deepspeed(context: Context) -> ModuleType:
    """Import DeepSpeed for the device type of the context.

    Raises:
        BackendNotInstalledError: DeepSpeed is not installed, or was imported earlier for another device type.
    """
    if find_spec("deepspeed") is None:
        raise BackendNotInstalledError(
            "backend='deepspeed': the package deepspeed is not installed; it comes with "
            "pip install 'drivetrain[deepspeed]', or 'drivetrain-backends[deepspeed]'"
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
    if context.group is None:
        raise RuntimeError(
            "the deepspeed backend needs a process group, in one process too; connect(needs_group=True) makes one"
        )
    from deepspeed import comm

    drop_ended_groups(_has_ended)
    with _variables(context):
        if not comm.is_initialized():
            with telling_of_builds(context):
                comm.init_distributed(dist_init_required=False)
        yield


def accumulates(parameters: Iterable[Tensor]) -> bool:
    """Return whether the running backward adds to a gradient of the parameters; `torch.autograd.grad` does not."""
    from deepspeed.runtime.utils import count_used_parameters_in_backward

    trained: list[Any] = [parameter for parameter in parameters if parameter.requires_grad]
    try:
        return bool(count_used_parameters_in_backward(trained))
    except RuntimeError:  # a parameter is an input of `torch.autograd.grad`
        return False


def local_rank_known(context: Context) -> AbstractContextManager[None]:
    """Set LOCAL_RANK in the block: stage 3 reads it in every backward, and a single process lacks it."""
    return environ.exported(LOCAL_RANK=str(context.topology.local_rank))


def _has_ended(group: Any) -> bool:
    """Return whether a process group was destroyed."""
    try:
        dist.get_process_group_ranks(group)
    except KeyError:
        return True
    return False


def _variables(context: Context):
    topology = context.topology
    return environ.exported(
        DS_ACCELERATOR=context.device.type,
        RANK=str(topology.rank),
        LOCAL_RANK=str(topology.local_rank),
        WORLD_SIZE=str(topology.world_size),
    )
