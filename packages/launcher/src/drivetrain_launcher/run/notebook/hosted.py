"""Notebooks that a provider hosts, Colab and Kaggle, told by their environment."""

from collections.abc import Mapping
from dataclasses import dataclass

from drivetrain_launcher.errors import LaunchError

# A variable that the provider sets in each of its notebooks, and the provider's name.
_PROVIDERS = {
    "COLAB_RELEASE_TAG": "Colab",
    "COLAB_BACKEND_VERSION": "Colab",
    "KAGGLE_KERNEL_RUN_TYPE": "Kaggle",
}
# Variables that runtimes with a TPU have.
_TPU_VARIABLES = (
    "COLAB_TPU_ADDR",
    "TPU_NAME",
    "TPU_WORKER_ID",
    "TPU_ACCELERATOR_TYPE",
    "TPU_PROCESS_ADDRESSES",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NotebookHost:
    """The place where a notebook runs.

    Attributes:
        provider: "Colab" or "Kaggle"; None elsewhere.
        has_tpu: Whether the runtime has a TPU.
    """

    provider: str | None = None
    has_tpu: bool = False


def detect_notebook_host(environment: Mapping[str, str]) -> NotebookHost:
    """Return where a notebook with these environment variables runs."""
    provider = next((name for variable, name in _PROVIDERS.items() if variable in environment), None)
    has_tpu = environment.get("PJRT_DEVICE") == "TPU" or any(name in environment for name in _TPU_VARIABLES)
    return NotebookHost(provider=provider, has_tpu=has_tpu)


def check_supported(host: NotebookHost, *, num_processes: int | None) -> None:
    """Refuse to launch on a TPU, unless the caller asks for this process only.

    Raises:
        LaunchError: If the runtime has a TPU and `num_processes` is not 1.
    """
    if host.has_tpu and num_processes != 1:
        where = f"this {host.provider} runtime" if host.provider else "this machine"
        raise LaunchError(
            f"num_processes={num_processes}: {where} has a TPU, which drivetrain does not drive; choose a GPU "
            "runtime, or use debug_launcher, which trains on the CPU; num_processes=1 calls the function in this "
            "process, whatever it does there"
        )
