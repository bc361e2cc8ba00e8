"""The `fsdp` section for the parallel dimensions, and what is refused of them."""

from typing import TYPE_CHECKING

from drivetrain_accelerate.plugins.option_fields import refusal

if TYPE_CHECKING:  # torch's device meshes take seconds to import
    from drivetrain_accelerate.plugins.parallelism_config import ParallelismConfig


def parallelism_sections(configuration: "ParallelismConfig") -> dict[str, object]:
    """Return the fields of the `fsdp` section: the ranks that share one replica."""
    for name in ("tp_size", "cp_size", "sp_size"):
        if (size := getattr(configuration, name)) > 1:
            raise refusal(configuration, name, size)
    if configuration.dp_shard_size == 1:
        return {"strategy": "no_shard"} if configuration.dp_replicate_size > 1 else {}
    if configuration.dp_replicate_size == 1:
        return {"strategy": "full_shard"}
    return {"strategy": "hybrid_shard", "shard_size": configuration.dp_shard_size}


def check_dimensions(configuration: "ParallelismConfig", *, num_processes: int) -> None:
    """Check sizes, and, where one is above 1, their product against the number of processes."""
    parallelism_sections(configuration)
    if configuration.total_size not in (1, num_processes):
        sizes = ", ".join(
            f"{name}={size}" for name, size in vars(configuration).items() if name.endswith("_size")
        )
        raise ValueError(
            f"ParallelismConfig({sizes}): the product of the sizes is {configuration.total_size}, and there are "
            f"{num_processes} processes: make them equal"
        )


def check_engine_dimensions(configuration: "ParallelismConfig | None") -> None:
    """Refuse replicas and shards under DeepSpeed, which partitions over all ranks."""
    for name in ("dp_replicate_size", "dp_shard_size"):
        if configuration is not None and (size := getattr(configuration, name)) > 1:
            instead = "DeepSpeed partitions over all ranks; leave it out, or give fsdp_plugin= in place of DeepSpeed"
            raise refusal(configuration, name, size, instead, ours="deepspeed.stage")
