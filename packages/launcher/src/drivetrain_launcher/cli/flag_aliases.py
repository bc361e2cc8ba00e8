"""Flags as users of Accelerate and torchrun spell them: translated to ours, or refused with the way out.

A move should cost nothing, and nothing that was asked for may be dropped silently. Those whose values are spelled
otherwise too, for FSDP and DeepSpeed, are in `sharding_flags.py`.
"""

from collections.abc import Collection, Mapping

# Their flag -> ours; the value goes along.
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

# Their switch -> what it means here.
MEANINGS: Mapping[str, tuple[str, ...]] = {
    "--multi-gpu": ("--state-device", "cuda"),
    "--use-fsdp": ("--backend", "fsdp"),
    "--use-deepspeed": ("--backend", "deepspeed"),
    "--use-xpu": ("--state-device", "xpu"),
    "--mps": ("--state-device", "mps"),
    "--standalone": ("--num-nodes", "1"),
    "--same-network": (),  # asks for static rendezvous, which is what nodes do here
}

_MEGATRON = "there is no Megatron backend here yet; --backend fsdp and --backend deepspeed shard the model"
_DIMENSIONS = "the split into dimensions is said in code, Accelerator(parallelism=ParallelDims(...))"
_LOGS = "--log-dir FOLDER writes the output of each rank to a file, besides the screen"
_AFFINITY = "start the launcher under numactl or taskset; the ranks inherit what it sets"

# The beginning of their flag -> what is not there, and the way out.
_REFUSED: Mapping[str, str] = {
    "--use-megatron-lm": _MEGATRON,
    "--megatron-lm": _MEGATRON,
    "--use-parallelism-config": _DIMENSIONS,
    "--parallelism-config": _DIMENSIONS,
    "--tpu": "there is no TPU launcher here yet",
    "--vm": "there is no TPU launcher here yet",
    "--ipex": "Intel's extension is part of torch by now; --state-device xpu trains on an Intel GPU",
    "--dynamo": "call torch.compile(model) in the script, before accelerator.prepare",
    "--downcast-bf16": "it is for TPUs, for which there is no launcher here yet",
    "--fp8": "there is no fp8 training here yet; --mixed-precision bf16 is the narrowest",
    "--enable-cpu-affinity": _AFFINITY,
    "--numa-binding": _AFFINITY,
    "--aws": "there is no SageMaker launcher here",
    "--main-training-function": "it is for notebooks; use notebook_launcher(function)",
    "--tee": _LOGS,
    "--redirects": _LOGS,
    "--rdzv-endpoint": "say --master-addr HOST and --master-port PORT",
    "--rdzv-conf": "--rdzv-timeout-seconds sets how long nodes wait for each other; nothing else is set",
    "--role": "all ranks have one role here; leave it out",
    "--start-method": "ranks are processes of their own here; leave it out",
    "--quiet": "the launcher shows the failing rank's traceback alone already; leave it out",
}


def ours(name: str, known: Collection[str]) -> tuple[str, ...]:
    """Our flag for one that a user wrote, with its value where the spelling alone says it.

    Args:
        name: As written, up to an `=`.
        known: Our flags.

    Returns:
        The flag; the flag and its value; nothing where the wish is met anyway.
    """
    hyphened = name if name == "-m" else name.replace("_", "-")
    if hyphened in known:
        return (hyphened,)
    if hyphened in MEANINGS:
        return MEANINGS[hyphened]
    renamed = RENAMED.get(hyphened, hyphened)
    if renamed == "--cpu" and renamed not in known:  # the run section, which has it, comes with the umbrella
        return ("--state-device", "cpu")
    return (renamed,)


def refusal(name: str) -> str | None:
    """Why a flag of Accelerate's or torchrun's is not available, and the way out; None if it is none of theirs."""
    hyphened = name.replace("_", "-")
    for start, reason in _REFUSED.items():
        if hyphened == start or hyphened.startswith(f"{start}-"):
            return reason
    return None
