"""The arguments of `drivetrain plan`, read without torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from drivetrain_messages import argument


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanTrainingArguments:
    """The arguments of `drivetrain plan`."""

    model: str = argument(
        ...,
        "Folder of a Hugging Face model, or its config.json; or module:factory, a function that returns a model.",
        positional=True,
    )
    gpu: str = argument(
        ..., "Devices of a host, and hosts: '8x80GB h100', '8x80GB h100 x 4 hosts 400Gb', '2x8GB cpu'."
    )
    batch: int = argument(..., "Number of samples in an optimizer step, of all processes together.")
    sequence: int = argument(1024, "Number of tokens in a sample.")
    mode: Literal["fp32", "mixed", "bf16", "lora"] = argument(
        "mixed",
        "Dtypes: fp32, mixed (weights in fp32, computing in bf16), bf16, or lora (frozen bf16, adapters).",
    )
    optimizer: Literal["adamw", "adamw-fused", "adamw-loop", "sgd", "sgd-momentum", "adafactor"] = argument(
        "adamw", "Optimizer."
    )
    lora_rank: int = argument(16, "Rank of the adapters of mode lora.")
    pin: tuple[str, ...] = argument(
        (), "Parts of the plan that are given, such as tensor=2,strategy=full_shard; the rest is chosen."
    )
    deepspeed: bool = argument(False, "Whether plans of DeepSpeed's ZeRO are candidates.")
    show: int = argument(8, "Number of plans in the table.")
    picture: Path | None = argument(None, "SVG file to draw the plans' memory to.")
    json: bool = argument(False, "Print JSON, for programs.")

    def __post_init__(self) -> None:
        for name in ("batch", "sequence", "lora_rank", "show"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} {getattr(self, name)}: must be at least 1")
