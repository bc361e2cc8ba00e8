"""The options of tensor, context and sequence parallelism, and their translation into settings."""

from typing import TYPE_CHECKING, Any

from drivetrain_accelerate.environment_variables import fill_unsaid, value_from
from drivetrain_accelerate.plugins.option_fields import check_refused, options, refusal, refused
from drivetrain_config import environ

if TYPE_CHECKING:  # torch's device meshes take seconds to import
    from torch.distributed.device_mesh import DeviceMesh

_ATTENTIONS = ("flash_attention_2", "flash_attention_3", "sdpa")
_ENV = "PARALLELISM_CONFIG_"


@options
class TorchTensorParallelPlugin:
    """The older options of tensor parallelism; `ParallelismConfig` replaces them."""

    tp_size: int = refused("parallel.tensor", "say ParallelismConfig(tp_size=...)", default=1)
    torch_device_mesh: "DeviceMesh | None" = None


@options
class TorchTensorParallelConfig:
    """Options of tensor parallelism."""

    enable_async_tp: bool = refused(
        "parallel.tensor", "it overlaps nothing there; leave it out", default=False
    )


@options
class TorchContextParallelConfig:
    """Options of context parallelism."""

    cp_comm_strategy: str | None = None

    def __post_init__(self) -> None:
        """Fill the strategy; raise a ValueError for an unknown one."""
        fill_unsaid(self, _ENV, cp_comm_strategy="allgather")
        if self.cp_comm_strategy not in ("allgather", "alltoall"):
            raise ValueError(f"cp_comm_strategy={self.cp_comm_strategy!r}: must be 'allgather' or 'alltoall'")


@options
class DeepSpeedSequenceParallelConfig:
    """Options of DeepSpeed's sequence parallelism."""

    sp_seq_length: int | None = None
    sp_seq_length_is_variable: bool | None = None
    sp_attn_implementation: str | None = None

    def __post_init__(self) -> None:
        """Fill the fields; raise a ValueError for a missing length or an unknown attention."""
        fill_unsaid(self, _ENV, sp_seq_length_is_variable=True)
        if self.sp_seq_length is None and not self.sp_seq_length_is_variable:
            name = f"{_ENV}SP_SEQ_LENGTH"
            if environ.read(name) is None:
                raise ValueError(
                    "sp_seq_length_is_variable=False without sp_seq_length: give the length, in code or as the "
                    f"environment variable {name}"
                )
            self.sp_seq_length = value_from(name, 0)
        if self.sp_attn_implementation is None:
            self.sp_attn_implementation = environ.read(f"{_ENV}SP_ATTN_IMPLEMENTATION")
        name = self.sp_attn_implementation
        is_of_hub = name is not None and "/" in name and "flash-attn" in name
        if name not in (None, *_ATTENTIONS) and not is_of_hub:
            raise ValueError(
                f"Invalid sp_attn_implementation: {name}. Must be one of {list(_ATTENTIONS)} or a flash attention "
                "of the hub, such as kernels-community/flash-attn2"
            )


def parallelism_sections(configuration: Any) -> dict[str, object]:
    """Return the `fsdp` section's fields for a `ParallelismConfig`: the strategy and the ranks of one replica."""
    if (size := configuration.sp_size) > 1:
        raise refusal(configuration, "sp_size", size)
    if configuration.dp_shard_size == 1:
        return {"strategy": "no_shard"} if configuration.dp_replicate_size > 1 else {}
    if configuration.dp_replicate_size == 1:
        return {"strategy": "full_shard"}
    return {"strategy": "hybrid_shard", "shard_size": configuration.dp_shard_size}


def parallel_sizes(configuration: Any) -> dict[str, object]:
    """Return the `parallel` section's fields, if a `ParallelismConfig` divides layers or sequences."""
    if configuration.tp_handler is not None:
        check_refused(configuration.tp_handler)
    if configuration.tp_size == configuration.cp_size == 1:
        return {}
    names = {"data": "dp_replicate_size", "shard": "dp_shard_size", "context": "cp_size", "tensor": "tp_size"}
    return {ours: getattr(configuration, name) for ours, name in names.items()}


def check_dimensions(configuration: Any, *, num_processes: int) -> None:
    """Refuse sizes that are not supported; if any is above 1, their product must be the number of processes."""
    parallelism_sections(configuration)
    if configuration.total_size not in (1, num_processes):
        raise ValueError(
            f"ParallelismConfig(...): the product of the sizes is {configuration.total_size}, and there are "
            f"{num_processes} processes: make them equal"
        )


def check_engine_dimensions(configuration: Any) -> None:
    """Refuse sizes of replicas and shards under DeepSpeed, since it partitions over all ranks."""
    for name in ("dp_replicate_size", "dp_shard_size", "tp_size"):
        if configuration is not None and (size := getattr(configuration, name)) > 1:
            instead = "DeepSpeed partitions over all ranks; leave it out, or give fsdp_plugin= in place of DeepSpeed"
            raise refusal(configuration, name, size, instead, ours="deepspeed.stage")
