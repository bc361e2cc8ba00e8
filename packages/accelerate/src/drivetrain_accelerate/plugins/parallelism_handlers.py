"""The options of tensor, context and sequence parallelism."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from drivetrain_accelerate.plugins.environment_words import integer_from, truth_from, word_from
from drivetrain_accelerate.plugins.known_fields import with_known_fields
from drivetrain_config import environ

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_ATTENTIONS = ("flash_attention_2", "flash_attention_3", "sdpa")
_ENV = "PARALLELISM_CONFIG"


@with_known_fields
@dataclass
class TorchTensorParallelPlugin:
    """Options of tensor parallelism, from before `ParallelismConfig`.

    Attributes:
        tp_size: The number of processes that split each matrix.
        torch_device_mesh: The mesh of these processes.
    """

    tp_size: int = 1
    torch_device_mesh: "DeviceMesh | None" = None


@with_known_fields
@dataclass
class TorchTensorParallelConfig:
    """Options of tensor parallelism.

    Attributes:
        enable_async_tp: Whether communication overlaps computation.
    """

    enable_async_tp: bool = False


@with_known_fields
@dataclass
class TorchContextParallelConfig:
    """Options of context parallelism.

    Attributes:
        cp_comm_strategy: The way in which keys and values go around: "allgather" or "alltoall".
    """

    cp_comm_strategy: str | None = None

    def __post_init__(self) -> None:
        """Fill the strategy.

        Raises:
            ValueError: It is unknown.
        """
        if self.cp_comm_strategy is None:
            self.cp_comm_strategy = word_from(f"{_ENV}_CP_COMM_STRATEGY", "allgather")
        if self.cp_comm_strategy not in ("allgather", "alltoall"):
            raise ValueError(f"cp_comm_strategy={self.cp_comm_strategy!r}: must be 'allgather' or 'alltoall'")


@with_known_fields
@dataclass
class DeepSpeedSequenceParallelConfig:
    """Options of DeepSpeed's sequence parallelism.

    Attributes:
        sp_seq_length: The length of sequences, if all are equally long.
        sp_seq_length_is_variable: Whether they differ.
        sp_attn_implementation: The attention that models compute with.
    """

    sp_seq_length: int | None = None
    sp_seq_length_is_variable: bool | None = None
    sp_attn_implementation: str | None = None

    def __post_init__(self) -> None:
        """Fill the fields.

        Raises:
            ValueError: The length is missing, or the attention cannot be used.
        """
        if self.sp_seq_length_is_variable is None:
            self.sp_seq_length_is_variable = truth_from(f"{_ENV}_SP_SEQ_LENGTH_IS_VARIABLE", default=True)
        if self.sp_seq_length is None and not self.sp_seq_length_is_variable:
            name = f"{_ENV}_SP_SEQ_LENGTH"
            if environ.read(name) is None:
                raise ValueError(
                    "sp_seq_length_is_variable=False without sp_seq_length: give the length, in code or as the "
                    f"environment variable {name}"
                )
            self.sp_seq_length = integer_from(name, 0)
        if self.sp_attn_implementation is None:
            self.sp_attn_implementation = environ.read(f"{_ENV}_SP_ATTN_IMPLEMENTATION")
        if (name := self.sp_attn_implementation) is not None and not _can_split(name):
            raise ValueError(
                f"Invalid sp_attn_implementation: {name}. Must be one of {list(_ATTENTIONS)} or a flash attention "
                "of the hub, such as kernels-community/flash-attn2"
            )


def _can_split(attention: str) -> bool:
    return attention in _ATTENTIONS or ("/" in attention and "flash-attn" in attention)
