"""Accelerate's and torchrun's options of the launch itself, whose value decides whether they have a meaning here."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from drivetrain_accelerate.migration.option_meanings import (
    NO_CHANGE,
    Family,
    Meaning,
    Reader,
    is_set,
    notice,
    one_of,
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


def _sizes(reason: str) -> Reader:
    """Return the reader of the size of a parallel dimension, of which 1 asks for nothing."""
    return one_of({"1": NO_CHANGE}, otherwise=refused(reason))


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


def _together(_given: Mapping[str, Any]) -> Mapping[str, Meaning]:
    return {}


LAUNCH = Family(
    backend="",
    words=MappingProxyType(
        {
            "tee": one_of(
                {
                    "0": NO_CHANGE,
                    "3": notice("every rank's output is shown; --log-dir FOLDER writes it to files too"),
                },
                otherwise=refused(_LOGS),
            ),
            "redirects": one_of({"0": NO_CHANGE}, otherwise=refused(_LOGS)),
            "role": one_of(
                {"default": NO_CHANGE}, otherwise=refused("all ranks have one role here; leave it out")
            ),
            "rdzv_conf": _rendezvous,
            "start_method": one_of(
                {"spawn": NO_CHANGE},
                otherwise=refused("ranks are processes of their own here; leave it out"),
            ),
            "dynamo_backend": one_of({"no": NO_CHANGE}, otherwise=refused(_COMPILE)),
            "main_training_function": one_of(
                {"main": NO_CHANGE},
                otherwise=refused("it is for notebooks; use notebook_launcher(function)"),
            ),
            "parallelism_config_dp_replicate_size": _sizes(_REPLICATE),
            "parallelism_config_dp_shard_size": _sizes(_SHARD),
            "parallelism_config_tp_size": _sizes(_DIMENSIONS),
            "parallelism_config_cp_size": _sizes(_DIMENSIONS),
            "parallelism_config_sp_size": _sizes(_DIMENSIONS),
        }
    ),
    together=_together,
)
