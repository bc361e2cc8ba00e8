"""The `run` section: the settings of a training run on any hardware."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

_LOST_SLASH = re.compile(r"[a-z][a-z0-9+.-]+:/")  # a URL after `Path` has dropped a slash


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """The settings of every run: precision, backend, accumulation, seed, destination of results.

    Example:
        >>> RunSettings(gradient_accumulation_steps=0)
        Traceback (most recent call last):
        ValueError: gradient_accumulation_steps=0: must be at least 1 micro-batch
    """

    mixed_precision: Literal["no", "fp16", "bf16", "fp8", "auto"] = field(
        default="no",
        metadata={
            "brief": "no, fp16, bf16, fp8 or auto",
            "topic": "Training",
            "ask": "drivetrain.run_advice:ask_mixed_precision",
            "help": "Precision of forward and backward: no (the model's own), fp16, bf16, fp8 (linear layers in fp8 "
            "by precision.fp8_recipe, the rest in bf16), or auto for the best of the first three.",
        },
    )
    backend: str | None = field(
        default=None,
        metadata={
            "brief": "ddp, fsdp, another one, or auto",
            "topic": "Training",
            "ask": "drivetrain.run_advice:ask_backend",
            "plugins": "drivetrain.backends",
            "other_words": ("auto",),
            "help": "Backend that trains the models: single, ddp or an installed one; auto: planned from the first "
            "prepared model and the hardware; unset: ddp with several processes, or single.",
        },
    )
    gradient_accumulation_steps: int = field(
        default=1,
        metadata={
            "brief": "Micro-batches in a step",
            "topic": "Training",
            "ask": "drivetrain.run_advice:ask_accumulation",
            "help": "Number of micro-batches in one optimizer step.",
        },
    )
    accumulation_world_size: int | None = field(
        default=None,
        metadata={
            "help": "Number of processes that gradient_accumulation_steps is meant for; on another number, as in "
            "an elastic run, it is scaled to keep the global batch; unset: it is the same for any number."
        },
    )
    on_nonfinite: Literal["warn", "skip", "raise"] = field(
        default="warn",
        metadata={
            "help": "Handling of a step whose gradients hold an infinity or NaN: warn takes it, and warns at the "
            "first such loss; skip skips it on all ranks; raise raises an error that names the layer."
        },
    )
    cpu: bool = field(
        default=False,
        metadata={
            "brief": "Train on the CPU",
            "topic": "Processes",
            "help": "Whether to train on the CPU even where an accelerator is present.",
        },
    )
    seed: int | None = field(
        default=None,
        metadata={
            "brief": "Seed of random numbers and of the data",
            "topic": "Training",
            "help": "Seed of every random number generator and of the data's order.",
        },
    )
    project_dir: Path | None = field(
        default=None,
        metadata={
            "brief": "Folder of checkpoints, logs and the plan",
            "topic": "Results",
            "ask": "drivetrain.run_advice:ask_project_dir",
            "help": "Folder of checkpoints, logs and the effective plan.",
        },
    )
    log_with: tuple[str, ...] = field(
        default=(),
        metadata={
            "brief": "Trackers, such as jsonl; or all",
            "topic": "Results",
            "ask": "drivetrain.run_advice:ask_log_with",
            "plugins": "drivetrain.trackers",
            "other_words": ("all", "module:Class"),
            "help": "Trackers to log to, such as jsonl; all: every installed one.",
        },
    )
    show_plan: bool = field(
        default=True,
        metadata={
            "help": "Whether rank 0 prints a summary of the effective plan when training starts, once per "
            "process."
        },
    )
    verbose: bool = field(
        default=False,
        metadata={
            "brief": "Print the whole plan",
            "topic": "Results",
            "help": "Whether to print the full effective plan instead of the summary: every setting given or "
            "chosen, and why.",
        },
    )

    def __post_init__(self) -> None:
        """Check every field."""
        modes = ("no", "fp16", "bf16", "fp8", "auto")
        if self.mixed_precision not in modes:
            raise ValueError(f"mixed_precision={self.mixed_precision!r}: must be one of {', '.join(modes)}")
        if self.gradient_accumulation_steps < 1:
            raise ValueError(
                f"gradient_accumulation_steps={self.gradient_accumulation_steps!r}: must be at least 1 micro-batch"
            )
        if self.accumulation_world_size is not None and self.accumulation_world_size < 1:
            raise ValueError(
                f"accumulation_world_size={self.accumulation_world_size!r}: must be at least 1 process"
            )
        if self.on_nonfinite not in ("warn", "skip", "raise"):
            raise ValueError(f"on_nonfinite={self.on_nonfinite!r}: must be one of warn, skip, raise")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise ValueError(f"seed={self.seed!r}: must lie between 0 and 2**63 - 1")
        if self.project_dir is not None and _LOST_SLASH.match(self.project_dir.as_posix()):
            raise ValueError(
                f"project_dir={str(self.project_dir)!r}: logs and the plan go into a folder, not to a URL; name a "
                "folder here, and the URL as directory of the checkpoint section"
            )


def usual_backend(num_ranks: int, num_shards: int = 1) -> str:
    """Return the backend of a run that names none, where gradients of ranks add up and some divide the parameters."""
    return "fsdp" if num_shards > 1 else "single" if num_ranks == 1 else "ddp"
