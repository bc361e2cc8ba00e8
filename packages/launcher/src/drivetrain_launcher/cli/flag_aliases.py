"""The flags of Accelerate and torchrun: translated to drivetrain's, or refused with an alternative.

Command lines keep working after a switch to drivetrain, and no flag is ignored silently. `foreign_flags.py`
handles flags whose values need translation too, such as Accelerate's for FSDP, DeepSpeed and fp8.
"""

from collections.abc import Collection, Mapping

# Their flag -> ours, with the same value.
RENAMED: Mapping[str, str] = {
    "--num-machines": "--num-nodes",
    "--nnodes": "--num-nodes",
    "--machine-rank": "--node-rank",
    "--main-process-ip": "--master-addr",
    "--main-process-port": "--master-port",
    "--nproc-per-node": "--processes-per-node",
    "--gpu-ids": "--devices",
    "--num-cpu-threads-per-process": "--threads-per-process",
    "--monitor-interval": "--monitor-interval-seconds",
    "--shutdown-timeout": "--shutdown-timeout-seconds",
    "--config-file": "--config",
    "-m": "--module",
    "-v": "--verbose",
    "--no-python": "--program",
    "--debug": "--state-debug",
    "--use-cpu": "--cpu",
}

# A switch, theirs if not said otherwise -> our flag and value.
MEANINGS: Mapping[str, tuple[str, ...]] = {
    "--multi-gpu": ("--state-device", "cuda"),
    "--use-fsdp": ("--backend", "fsdp"),
    "--use-deepspeed": ("--backend", "deepspeed"),
    "--use-megatron-lm": ("--backend", "megatron"),
    "--use-xpu": ("--state-device", "xpu"),
    "--tpu": ("--state-device", "tpu"),
    "--mps": ("--state-device", "mps"),
    "--as-accelerate": ("--through", "drivetrain_accelerate"),  # ours: the name is shorter than the module's
    "--standalone": ("--num-nodes", "1"),
    "--no-prefix": ("--prefix", "none"),
    "--enable-cpu-affinity": ("--bind", "auto"),
    "--same-network": (),  # requests static rendezvous, the default here
    "--quiet": (),  # requests the failing rank's traceback alone, as the launcher shows it anyway
    "-q": (),
    "--no-tpu-cluster": (),  # switches off what is not here
    "--fp8-use-autocast-during-eval": (),  # evaluation computes in fp8 here anyway
}

_DIMENSIONS = (
    "say the sizes of the parallel dimensions: --parallel-tensor N, --parallel-shard N, --parallel-data N"
)
_PODS = "the hosts of a slice run a job by `drivetrain submit --on tpu-pod --option hosts=HOST,HOST`"
_BINDING = "--bind auto gives each rank cores of its own on the NUMA node of its device"

# Prefix of their flag -> the reason why it is unsupported, and the alternative.
_REFUSED: Mapping[str, str] = {
    "--use-parallelism-config": _DIMENSIONS,
    "--parallelism-config": _DIMENSIONS,
    "--tpu-cluster": _PODS,
    "--tpu-use-sudo": _PODS,
    "--vm": _PODS,
    "--env": "set the variables in the shell that starts the launcher: NAME=VALUE drivetrain launch ...",
    "--ipex": "Intel's extension is part of torch by now; --state-device xpu trains on an Intel GPU",
    "--dynamo": "call torch.compile(model) in the script, before accelerator.prepare",
    "--downcast-bf16": "TPUs compute in bf16 by --mixed-precision bf16",
    "--numa-binding": _BINDING,
    "--aws": "there is no SageMaker launcher here",
    "--local-ranks-filter": "--show-ranks 0,8 names the ranks to show, counted over all nodes",
    "--rdzv-endpoint": "say --master-addr HOST and --master-port PORT",
    "--mpirun": "start the launcher by mpirun itself: mpirun --hostfile FILE drivetrain launch ...; each task then "
    "knows its rank",
}


def ours(name: str, known: Collection[str]) -> tuple[str, ...]:
    """Translate a flag (the text before any `=`) to one of the `known` flags, followed by any implied value.

    The tuple is empty for a flag that requests the default behaviour.
    """
    hyphened = name.replace("_", "-")
    if hyphened in known:
        return (hyphened,)
    if hyphened in MEANINGS:
        return MEANINGS[hyphened]
    renamed = RENAMED.get(hyphened, hyphened)
    if renamed == "--cpu" and renamed not in known:  # the umbrella package, which has --cpu, is not installed
        return ("--state-device", "cpu")
    return (renamed,)


def refusal(name: str) -> str | None:
    """Return why a flag of Accelerate or torchrun is unsupported, and the alternative; None for any other flag."""
    hyphened = name.replace("_", "-")
    for start, reason in _REFUSED.items():
        if hyphened == start or hyphened.startswith(f"{start}-"):
            return reason
    return None
