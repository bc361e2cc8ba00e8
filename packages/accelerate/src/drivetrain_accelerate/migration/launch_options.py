"""Accelerate's and torchrun's options of the launch itself, whose value decides whether they have a meaning here."""

from typing import Any

from drivetrain_accelerate.migration.option_meanings import (
    NO_CHANGE,
    Family,
    Meaning,
    is_set,
    notice,
    one_of,
    only,
    refused,
    set_field,
)

_DIMENSIONS = "the parallel dimensions are set in code, Accelerator(parallelism=ParallelDims(...))"
_REPLICATE = (
    "--backend ddp replicates over all ranks; --backend fsdp --fsdp-strategy hybrid_shard replicates over groups of "
    "--fsdp-shard-size N ranks"
)
_SHARD = (
    "--backend fsdp shards over all ranks; --fsdp-strategy hybrid_shard --fsdp-shard-size N over groups of N"
)
_LOGS = "--log-dir FOLDER writes the output of each rank to a file, in addition to the terminal"
_COMPILE = (
    "call torch.compile(model) in the script, before accelerator.prepare; --fsdp-compile-regions compiles each block "
    "under FSDP2"
)


def _rendezvous(value: Any) -> Meaning:
    """Read torch's options of a rendezvous, of which drivetrain has the timeout."""
    if not is_set(value):
        return NO_CHANGE
    parts = [part.strip().partition("=") for part in str(value).split(",") if part.strip()]
    pairs = {name: text for name, _, text in parts}
    seconds = [pairs.pop(name) for name in ("timeout", "join_timeout") if name in pairs]
    if pairs:
        return refused(f"{', '.join(pairs)} is not set here; timeout=SECONDS is, as --rdzv-timeout-seconds")
    if len(set(seconds)) > 1:
        return refused("timeout and join_timeout are one here, --rdzv-timeout-seconds; keep one")
    return set_field("launch", "rdzv_timeout_seconds", seconds[0])


LAUNCH = Family(
    words={
        "tee": one_of(
            {
                "0": NO_CHANGE,
                "3": notice("every rank's output is shown; --log-dir FOLDER writes it to files too"),
            },
            otherwise=refused(_LOGS),
        ),
        "redirects": only("0", _LOGS),
        "role": only("default", "all ranks have one role here; leave it out"),
        "rdzv_conf": _rendezvous,
        "start_method": only("spawn", "ranks are processes of their own here; leave it out"),
        "dynamo_backend": only("no", _COMPILE),
        "main_training_function": only("main", "it is for notebooks; use notebook_launcher(function)"),
        "parallelism_config_dp_replicate_size": only("1", _REPLICATE),
        "parallelism_config_dp_shard_size": only("1", _SHARD),
        "parallelism_config_tp_size": only("1", _DIMENSIONS),
        "parallelism_config_cp_size": only("1", _DIMENSIONS),
        "parallelism_config_sp_size": only("1", _DIMENSIONS),
    },
)
