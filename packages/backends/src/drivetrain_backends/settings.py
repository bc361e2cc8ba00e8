"""The `ddp` section: how DistributedDataParallel replicates a model."""

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class DDPSettings:
    """How gradients are bucketed, compressed and reduced by DistributedDataParallel."""

    find_unused_parameters: bool = field(
        default=False,
        metadata={"help": "search each forward for parameters that get no gradient (costs time)"},
    )
    static_graph: bool = field(
        default=False,
        metadata={"help": "the same parameters are used in every step; lets DDP optimise for it"},
    )
    gradient_as_bucket_view: bool = field(
        default=True, metadata={"help": "gradients live in the communication buckets; saves a copy of them"}
    )
    bucket_size_mb: float = field(default=25.0, metadata={"help": "size of a communication bucket in MB"})
    broadcast_buffers: bool = field(
        default=True,
        metadata={"help": "rank 0's buffers (batch norm statistics) reach all ranks at each forward"},
    )
    communication_hook: Literal["none", "fp16", "bf16", "power_sgd"] = field(
        default="none", metadata={"help": "compress gradients while they travel"}
    )
    power_sgd_rank: int = field(default=1, metadata={"help": "rank of PowerSGD's approximation"})
    power_sgd_start_step: int = field(
        default=1000, metadata={"help": "optimizer steps with plain all-reduce before PowerSGD begins"}
    )

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            ValueError: A value is outside its range; the message begins with the field's name.
        """
        if not self.bucket_size_mb > 0:
            raise ValueError(f"bucket_size_mb={self.bucket_size_mb!r}: must be above 0")
        hooks = ("none", "fp16", "bf16", "power_sgd")
        if self.communication_hook not in hooks:
            raise ValueError(
                f"communication_hook={self.communication_hook!r}: must be one of {', '.join(hooks)}"
            )
        if self.power_sgd_rank < 1:
            raise ValueError(f"power_sgd_rank={self.power_sgd_rank!r}: must be at least 1")
        if self.power_sgd_start_step < 2:
            raise ValueError(
                f"power_sgd_start_step={self.power_sgd_start_step!r}: must be at least 2, DDP's own limit"
            )
        if self.static_graph and self.find_unused_parameters:
            raise ValueError(
                "static_graph=True: finds unused parameters by itself, so find_unused_parameters must stay off"
            )
