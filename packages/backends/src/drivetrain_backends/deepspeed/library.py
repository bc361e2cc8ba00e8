"""DeepSpeed itself: imported when it is needed, for the device of the run, with the variables it wants."""

from collections.abc import Generator
from contextlib import contextmanager
from types import ModuleType

from drivetrain_backends.errors import BackendNotInstalledError
from drivetrain_config import environ
from drivetrain_state import Context


def load_deepspeed(context: Context) -> ModuleType:
    """Import DeepSpeed, for the kind of device the context computes on.

    Raises:
        BackendNotInstalledError: It is not installed, or was imported before for another kind of device.
    """
    with _variables(context):
        try:
            from deepspeed.accelerator import get_accelerator

            import deepspeed
        except ModuleNotFoundError as error:
            if error.name != "deepspeed":
                raise
            raise BackendNotInstalledError(
                "backend='deepspeed': the package deepspeed is not installed; it comes with "
                "pip install 'drivetrain[deepspeed]', or 'drivetrain-backends[deepspeed]'"
            ) from error
        found = get_accelerator().device_name()
    if found != context.device.type:
        raise BackendNotInstalledError(
            f"backend='deepspeed' on device {context.device.type!r}: DeepSpeed was imported before, and serves "
            f"{found!r} in this process; leave importing it to prepare(), or set DS_ACCELERATOR={context.device.type}"
        )
    return deepspeed


@contextmanager
def entering(context: Context) -> Generator[None]:
    """Inside, DeepSpeed finds the process group and the variables it reads. Called on all ranks.

    Raises:
        RuntimeError: The context has no process group.
    """
    if context.group is None:
        raise RuntimeError(
            "the deepspeed backend needs a process group, in one process too; connect(needs_group=True) makes one"
        )
    from deepspeed import comm

    with _variables(context):
        if not comm.is_initialized():
            comm.init_distributed(dist_init_required=False)
        yield


def _variables(context: Context):
    topology = context.topology
    return environ.exported(
        DS_ACCELERATOR=context.device.type,
        RANK=str(topology.rank),
        LOCAL_RANK=str(topology.local_rank),
        WORLD_SIZE=str(topology.world_size),
    )
