"""The `fsdp` section for the sizes of the parallel dimensions."""

from typing import TYPE_CHECKING

from drivetrain_accelerate.plugins.parallelism_handlers import TorchTensorParallelPlugin
from drivetrain_accelerate.plugins.translation import refusal

if TYPE_CHECKING:  # it imports torch's device meshes, which takes seconds
    from drivetrain_accelerate.plugins.parallelism_config import ParallelismConfig


def parallelism_sections(configuration: "ParallelismConfig") -> dict[str, object]:
    """Return the fields of the `fsdp` section: the ranks that share one replica.

    Raises:
        TranslationError: Matrices or sequences are split.
    """
    for name, what in (("tp", "matrices"), ("cp", "sequences"), ("sp", "sequences")):
        if (size := getattr(configuration, f"{name}_size")) > 1:
            raise refusal(
                "ParallelismConfig",
                f"{name}_size",
                size,
                "parallelism=ParallelDims(...)",
                f"no backend of drivetrain's splits {what} over ranks yet; use dp_shard_size instead",
            )
    if configuration.dp_shard_size == 1:
        return {"strategy": "no_shard"} if configuration.dp_replicate_size > 1 else {}
    if configuration.dp_replicate_size == 1:
        return {"strategy": "full_shard"}
    return {"strategy": "hybrid_shard", "shard_size": configuration.dp_shard_size}


def check_dimensions(configuration: "ParallelismConfig", *, num_processes: int) -> None:
    """Check sizes, also against the number of processes; where none is above 1, nothing is said.

    Raises:
        TranslationError: Matrices or sequences are split.
        ValueError: The product of the sizes is another number.
    """
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
    """Refuse sizes of data parallelism under DeepSpeed, which partitions over all ranks.

    Raises:
        TranslationError: Ranks are divided into replicas and shards.
    """
    for name in ("dp_replicate_size", "dp_shard_size"):
        if configuration is not None and (size := getattr(configuration, name)) > 1:
            raise refusal(
                "ParallelismConfig",
                name,
                size,
                "deepspeed.stage",
                "DeepSpeed partitions over all ranks; leave it out, or give fsdp_plugin= in place of DeepSpeed",
            )


def check_tensor_parallel(plugin: TorchTensorParallelPlugin) -> None:
    """Refuse tensor parallelism.

    Raises:
        TranslationError: Matrices are split.
    """
    if plugin.tp_size > 1:
        raise refusal(
            "TorchTensorParallelPlugin",
            "tp_size",
            plugin.tp_size,
            "parallelism=ParallelDims(...)",
            "no backend of drivetrain's splits matrices over ranks yet; use FSDP for models that do not fit",
        )
