"""The arguments of `drivetrain estimate`, read without torch."""

from dataclasses import dataclass
from typing import Literal

from drivetrain_messages import argument


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateArguments:
    """The arguments of `drivetrain estimate`."""

    model: str = argument(
        ...,
        "Folder of a Hugging Face model, or its config.json; or a file of weights, or their index.",
        positional=True,
    )
    mode: tuple[Literal["inference", "fp32", "mixed", "bf16", "lora"], ...] = argument(
        ("inference", "fp32", "mixed", "bf16", "lora"),
        "Ways to train to compare.",
    )
    batch: int = argument(1, "Number of samples in a step of one process.")
    seq: int = argument(1024, "Number of tokens in a sample.")
    optimizer: Literal["adamw", "adamw-fused", "adamw-loop", "sgd", "sgd-momentum", "adafactor"] = argument(
        "adamw", "Optimizer; adamw as torch runs it on a GPU."
    )
    recompute: bool = argument(False, "Compute activations again in the backward (activation checkpointing).")
    lora_rank: int = argument(16, "Rank of the adapters of mode lora.")
    num_processes: int = argument(
        1, "Number of processes, each of which computes whole layers and sequences."
    )
    sharding: Literal["ddp", "zero1", "zero2", "zero3", "fsdp"] = argument(
        "fsdp", "What processes divide among them."
    )
    json: bool = argument(False, "Print JSON, for programs.")

    def __post_init__(self) -> None:
        for name in ("batch", "seq", "lora_rank", "num_processes"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} {getattr(self, name)}: must be at least 1")
