"""The arguments of `drivetrain dispatch plan`, read without torch."""

from dataclasses import dataclass
from typing import Literal, get_args, get_type_hints

from drivetrain_messages import argument


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanArguments:
    """The arguments of `drivetrain dispatch plan`."""

    model_dir: str = argument(
        ..., "Folder of a Hugging Face model; config.json alone is enough.", positional=True
    )
    gpu: tuple[str, ...] = argument(
        (),
        "Memory of each accelerator, such as 24GB,24GB or '8x80GB h100'; by default, those of this machine. 0GB for "
        "none.",
    )
    cpu: str | None = argument(None, "Memory of the host, such as 64GB; by default, what is free here.")
    batch: int = argument(1, "Number of prompts at once.")
    seq: int | None = argument(None, "Tokens per prompt; by default 4096, or the model's limit if less.")
    dtype: Literal["bf16", "fp16", "fp32", "bfloat16", "float16", "float32"] | None = argument(
        None, "Dtype of the weights; by default, that in config.json."
    )
    quantize: Literal["bnb-8bit", "bnb-nf4", "bnb-fp4", "torchao-int8", "torchao-fp8"] | None = argument(
        None, "How weights are packed."
    )
    link: str | None = argument(
        None, "Bytes per second from the host to an accelerator; by default its kind's, or 25GB."
    )
    disk: str = argument("3GB", "Bytes per second from the disk.")
    tflops: float | None = argument(
        None,
        "Compute rate in 10^12 operations per second; by default that of the accelerator's kind, 100 if unknown, or "
        "0.5 without one.",
    )
    bandwidth: str | None = argument(
        None,
        "Memory bandwidth of what computes, in bytes per second; by default that of the accelerator's kind, 1TB if "
        "unknown, or 50GB without one.",
    )
    json: bool = argument(False, "Print JSON, for programs.")

    def __post_init__(self) -> None:
        for name in ("batch", "seq"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"--{name} {getattr(self, name)}: must be at least 1")
        kinds = get_type_hints(PlanArguments)
        for name, value in (("dtype", self.dtype), ("quantize", self.quantize)):
            words = get_args(get_args(kinds[name])[0])
            if value is not None and value not in words:
                raise ValueError(f"--{name} {value}: say one of {', '.join(words)}")
