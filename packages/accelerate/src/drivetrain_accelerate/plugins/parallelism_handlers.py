"""The options of tensor, context and sequence parallelism, and their translation into settings."""

import warnings
from typing import TYPE_CHECKING, Any

from drivetrain_accelerate.environment_variables import fill_unsaid, value_from
from drivetrain_accelerate.plugins.option_fields import becomes, options, refusal, without_effect
from drivetrain_config import environ

if TYPE_CHECKING:  # torch's device meshes take seconds to import
    from torch.distributed.device_mesh import DeviceMesh

_ATTENTIONS = ("flash_attention_2", "flash_attention_3", "sdpa")
_ENV = "PARALLELISM_CONFIG_"
GATHERED = "gathered"  # the method of Accelerate's default, "allgather"


@options
class TorchTensorParallelPlugin:
    """The older options of tensor parallelism; `ParallelismConfig` replaces them."""

    tp_size: int = becomes("parallel.tensor", default=1)
    torch_device_mesh: "DeviceMesh | None" = without_effect("neighbours divide layers", default=None)


@options
class TorchTensorParallelConfig:
    """Options of tensor parallelism."""

    enable_async_tp: bool = without_effect("as with Accelerate, nothing is overlapped", default=False)

    def __post_init__(self) -> None:
        """Warn of an option that changes nothing."""
        if self.enable_async_tp:
            warnings.warn(
                "enable_async_tp=True overlaps nothing, as with Accelerate: leave it out", stacklevel=4
            )


@options
class TorchContextParallelConfig:
    """Options of context parallelism."""

    cp_comm_strategy: str | None = becomes("parallel.context_method", default=None)

    def __post_init__(self) -> None:
        """Fill the strategy; raise a ValueError for an unknown one."""
        fill_unsaid(self, _ENV, cp_comm_strategy="allgather")
        if self.cp_comm_strategy not in ("allgather", "alltoall"):
            raise ValueError(f"cp_comm_strategy={self.cp_comm_strategy!r}: must be 'allgather' or 'alltoall'")


@options
class DeepSpeedSequenceParallelConfig:
    """Options of DeepSpeed's sequence parallelism."""

    sp_seq_length: int | None = without_effect("sequences of any length are divided", default=None)
    sp_seq_length_is_variable: bool | None = without_effect("as of the length", default=None)
    sp_attn_implementation: str | None = becomes("parallel.context_method", default=None)

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
    if configuration.dp_shard_size == 1:
        return {"strategy": "no_shard"} if configuration.dp_replicate_size > 1 else {}
    if configuration.dp_replicate_size == 1:
        return {"strategy": "full_shard"}
    return {"strategy": "hybrid_shard", "shard_size": configuration.dp_shard_size}


def parallel_sizes(configuration: Any, *, partitions_all: bool = False) -> dict[str, object]:
    """Return the `parallel` section's fields, if a `ParallelismConfig` divides layers or sequences.

    An engine that partitions over all ranks has no shards of its own: they only read different samples.
    """
    if configuration.non_data_parallel_size == 1:
        return {}
    sizes: dict[str, object] = {"data": configuration.dp_replicate_size, "shard": configuration.dp_shard_size}
    if partitions_all:
        sizes = {"data": configuration.data_parallel_size, "shard": 1}
    context = configuration.cp_size * configuration.sp_size
    sizes |= {"context": context, "tensor": configuration.tp_size}
    return sizes if context == 1 else {**sizes, "context_method": _context_method(configuration)}


def _context_method(configuration: Any) -> str:
    """Return how ranks exchange what attention needs; refuse what does not divide it so."""
    handler = configuration.sp_handler if configuration.sp_size > 1 else configuration.cp_handler
    if configuration.sp_size > 1:
        if (name := handler.sp_attn_implementation) not in (None, "sdpa"):
            raise refusal(handler, "sp_attn_implementation", name, "only sdpa is divided: say 'sdpa'")
        return "heads"
    if (name := handler.cp_comm_strategy) == "alltoall":
        instead = (
            "keys and values go round no ring here; 'allgather' computes the same, and sp_size= in place of cp_size= "
            "exchanges heads, for which no rank holds all keys and values"
        )
        raise refusal(handler, "cp_comm_strategy", name, instead)
    return GATHERED


def check_dimensions(configuration: Any, *, num_processes: int) -> None:
    """Raise a ValueError unless the product of the sizes is 1, or the number of processes."""
    if configuration.total_size not in (1, num_processes):
        raise ValueError(
            f"ParallelismConfig(...): the product of the sizes is {configuration.total_size}, and there are "
            f"{num_processes} processes: make them equal"
        )


def check_engine_dimensions(configuration: Any) -> None:
    """Refuse sizes that DeepSpeed has no use for: it partitions over all ranks, which may share sequences."""
    is_shared = configuration.cp_size * configuration.sp_size > 1
    for name in ("tp_size", *(() if is_shared else ("dp_replicate_size", "dp_shard_size"))):
        if (size := getattr(configuration, name)) > 1:
            instead = "DeepSpeed partitions over all ranks; leave it out, or give fsdp_plugin= in place of DeepSpeed"
            raise refusal(configuration, name, size, instead, ours="deepspeed.stage")
