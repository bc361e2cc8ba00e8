"""The configuration sections of the backends: `ddp` and `fsdp`."""

from dataclasses import dataclass, field
from typing import Any, Literal


def _setting(default: Any, text: str, *, ask: str = "", needs: str = "") -> Any:
    """Return a field with its help, its question in `backend_advice` and its conditions."""
    advice = f"drivetrain_backends.backend_advice:{ask}" if ask else ""
    metadata = {"help": text, "ask": advice, "needs": needs}
    return field(default=default, metadata={key: value for key, value in metadata.items() if value})


_WORDS = {"activation_checkpointing": ("none", "full", "selective"), "compile": ("none", "blocks", "whole")}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """The settings of what becomes of every model before its backend prepares it, whichever backend that is."""

    activation_checkpointing: Literal["none", "full", "selective"] = _setting(
        "none",
        "Recomputation of activations in backward: full for each block, selective for all but matrix products and "
        "attention.",
    )
    compile: Literal["none", "blocks", "whole"] = _setting(
        "none", "What torch.compile takes as one: each block by itself, or the whole model."
    )
    compile_backend: str = _setting("inductor", "Backend of torch.compile.", needs="compile!=none")
    blocks: tuple[str, ...] | None = _setting(
        None,
        "Classes of the blocks that are recomputed or compiled, or patterns of their names, such as layers.*.mlp; "
        "unset: the model's own choice, or the modules of its lists.",
        needs="activation_checkpointing!=none or compile!=none",
    )

    def __post_init__(self) -> None:
        """Refuse an unknown word; the message begins with the field's name."""
        for name, words in _WORDS.items():
            if (given := getattr(self, name)) not in words:
                raise ValueError(f"{name}={given!r}: must be one of {', '.join(words)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DDPSettings:
    """The settings by which DistributedDataParallel buckets, compresses and reduces gradients.

    Example:
        >>> DDPSettings(find_unused_parameters=True).static_graph
        False
    """

    reduce: Literal["overlap", "at_close"] | None = _setting(
        None,
        "When gradients are averaged: overlap averages them while backward runs, at_close all at once when "
        "the window closes, independent of the order of calls; unset: overlap.",
    )
    find_unused_parameters: bool = _setting(
        False,
        "Whether to search each forward for parameters that get no gradient; slower.",
        needs="reduce!=at_close",
    )
    static_graph: bool = _setting(
        False, "Whether every step uses the same parameters, which lets DDP optimise for it."
    )
    gradient_as_bucket_view: bool = _setting(
        True,
        "Whether gradients are views of the communication buckets, which saves a copy of them.",
        needs="reduce!=at_close",
    )
    bucket_size_mb: float = _setting(25.0, "Size of a communication bucket in MB.", needs="reduce!=at_close")
    broadcast_buffers: bool = _setting(
        True, "Whether rank 0's buffers (batch norm statistics) are broadcast to all ranks at each forward."
    )
    sync_batch_norm: bool = _setting(
        False, "Whether to normalise over the batches of all ranks, by torch's SyncBatchNorm (GPU only)."
    )
    communication_hook: Literal["none", "fp16", "bf16", "power_sgd"] = _setting(
        "none", "Compression of gradients during communication."
    )
    power_sgd_rank: int = _setting(
        1, "Rank of PowerSGD's approximation.", needs="communication_hook=power_sgd"
    )
    power_sgd_start_step: int = _setting(
        1000,
        "Number of optimizer steps with plain all-reduce before PowerSGD begins.",
        needs="communication_hook=power_sgd",
    )
    check_drift_every: int | None = _setting(
        None,
        "Interval in optimizer steps at which the replicas' weights are compared; unset: at the first step, "
        "and at saves.",
    )

    def __post_init__(self) -> None:
        """Refuse a value outside its range; the message begins with the field's name."""
        if not self.bucket_size_mb > 0:
            raise ValueError(f"bucket_size_mb={self.bucket_size_mb!r}: must be above 0")
        hooks = ("none", "fp16", "bf16", "power_sgd")
        if self.communication_hook not in hooks:
            raise ValueError(
                f"communication_hook={self.communication_hook!r}: must be one of {', '.join(hooks)}"
            )
        if self.check_drift_every is not None and self.check_drift_every < 1:
            raise ValueError(f"check_drift_every={self.check_drift_every!r}: must be at least 1 step")
        if self.power_sgd_rank < 1:
            raise ValueError(f"power_sgd_rank={self.power_sgd_rank!r}: must be at least 1")
        if self.power_sgd_start_step < 2:
            raise ValueError(
                f"power_sgd_start_step={self.power_sgd_start_step!r}: must be at least 2, DDP's own limit"
            )
        if self.reduce not in (None, "overlap", "at_close"):
            raise ValueError(f"reduce={self.reduce!r}: must be overlap or at_close")
        if self.reduce == "at_close" and (self.static_graph or self.communication_hook != "none"):
            raise ValueError(
                "reduce='at_close': neither static_graph nor communication_hook has a part in it, for DDP's reducer "
                "does not run; leave them out, or say reduce='overlap'"
            )
        if self.static_graph and self.find_unused_parameters:
            raise ValueError(
                "static_graph=True: finds unused parameters by itself, so find_unused_parameters must stay off"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class FSDPSettings:
    """The settings by which FSDP2 (`fully_shard`) shards a model over ranks; the backend chooses unset values."""

    strategy: Literal["full_shard", "shard_grad_op", "hybrid_shard", "no_shard", "auto"] | None = _setting(
        None,
        "full_shard gathers parameters for forward and again for backward, shard_grad_op keeps them in "
        "between, hybrid_shard shards within groups of ranks and replicates across groups, no_shard "
        "replicates; auto: planned, with what else of the section is not said, from the first prepared model; "
        "unset: full_shard.",
        ask="ask_strategy",
    )
    shard_size: int | None = _setting(
        None, "Number of ranks in a sharding group of hybrid_shard; unset: the ranks of a node."
    )
    wrap: tuple[str, ...] | None = _setting(
        None, "Class names of the modules that are gathered one at a time, such as LlamaDecoderLayer."
    )
    min_num_params: int | None = _setting(
        None, "Minimum number of parameters of the modules that are gathered one at a time."
    )
    upcast: bool | None = _setting(
        None,
        "Whether to keep trainable parameters in fp32 where the model is given in half precision; unset: "
        "under fp16 and bf16, unless precision.param_dtype says what they are held in.",
    )
    broadcast_buffers: bool = _setting(
        True,
        "Whether rank 0's buffers (batch norm statistics) are broadcast to all ranks at each step that "
        "finds one changed.",
    )
    check_optimizers: bool = _setting(
        True,
        "Whether prepare tries optimizers that are not known to be element-wise on tiny shards, and refuses "
        "those whose steps differ.",
    )
    offload: bool = _setting(
        False,
        "Whether to keep shards, gradients and optimizer states on the CPU between uses.",
        ask="ask_offload",
    )
    pin_memory: bool | None = _setting(
        None, "Whether to offload to pinned memory; unset: with an accelerator."
    )
    prefetch: int | None = _setting(
        None, "Number of blocks to gather ahead in forward and backward; unset: torch's default."
    )

    def __post_init__(self) -> None:
        """Refuse a value outside its range, or two that contradict; the message begins with the field's name."""
        for name, least in (("shard_size", 1), ("min_num_params", 1), ("prefetch", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name}={value!r}: must be at least {least}")
        if self.shard_size is not None and self.strategy not in (None, "hybrid_shard"):
            raise ValueError(
                f"shard_size={self.shard_size} with strategy={self.strategy!r}: only 'hybrid_shard' divides ranks "
                "into groups; leave shard_size out, or choose that strategy"
            )
        if self.wrap is not None and self.min_num_params is not None:
            raise ValueError(
                f"wrap={self.wrap!r} with min_num_params={self.min_num_params}: modules are wrapped by class or by "
                "size; give one of the two"
            )
        if self.pin_memory and not self.offload:
            raise ValueError("pin_memory=True: nothing is offloaded; set offload=True, or leave it out")
