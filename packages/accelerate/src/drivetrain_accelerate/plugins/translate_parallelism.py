"""The `fsdp` section for the sizes of the parallel dimensions."""

from drivetrain_accelerate.plugins.parallelism_config import ParallelismConfig
from drivetrain_accelerate.plugins.parallelism_handlers import TorchTensorParallelPlugin
from drivetrain_accelerate.plugins.translation import refusal


def parallelism_sections(configuration: ParallelismConfig) -> dict[str, object]:
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
        return {}
    if configuration.dp_replicate_size == 1:
        return {"strategy": "full_shard"}
    return {"strategy": "hybrid_shard", "shard_size": configuration.dp_shard_size}


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
