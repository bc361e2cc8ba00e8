"""The `precision` section: the settings of fp16's loss scale and of fp8."""

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionSettings:
    """The initial value and the updates of the loss scale of fp16 training; bf16 and fp32 have no loss scale."""

    initial_scale: float = field(
        default=65536.0, metadata={"help": "Loss scale of the first step; halved at each overflow."}
    )
    growth_factor: float = field(
        default=2.0,
        metadata={"help": "Factor of the scale after growth_interval steps without overflow."},
    )
    backoff_factor: float = field(
        default=0.5, metadata={"help": "Factor of the scale after a step that overflowed."}
    )
    growth_interval: int = field(
        default=2000, metadata={"help": "Number of optimizer steps without overflow before the scale grows."}
    )
    check_half: bool = field(
        default=False,
        metadata={
            "help": "Look in the first step for softmaxes, norms and losses computed in half precision."
        },
    )
    fp8_recipe: str = field(
        default="auto",
        metadata={
            "help": "Recipe of mixed_precision=fp8, such as torchao_rowwise or te_current; auto: the best that the "
            "device and the installed libraries can run."
        },
    )
    fp8_fallback: Literal["none", "bf16"] = field(
        default="none",
        metadata={
            "help": "What to train in where fp8 cannot run: none stops with an error, bf16 goes on in bf16."
        },
    )
    fp8_exclude: tuple[str, ...] = field(
        default=(),
        metadata={
            "help": "Patterns of the names of linear layers that stay in bf16 under fp8, such as *.router."
        },
    )
    fp8_skip_ends: bool = field(
        default=True,
        metadata={"help": "Whether a model's first and last linear layer stay in bf16 under fp8."},
    )

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            ValueError: A value is outside its range; the message begins with the field's name.
        """
        if not self.initial_scale > 0:
            raise ValueError(f"initial_scale={self.initial_scale!r}: must be above 0")
        if not self.growth_factor > 1:
            raise ValueError(f"growth_factor={self.growth_factor!r}: must be above 1")
        if not 0 < self.backoff_factor < 1:
            raise ValueError(f"backoff_factor={self.backoff_factor!r}: must lie between 0 and 1")
        if self.growth_interval < 1:
            raise ValueError(f"growth_interval={self.growth_interval!r}: must be at least 1")
        if self.fp8_fallback not in ("none", "bf16"):
            raise ValueError(f"fp8_fallback={self.fp8_fallback!r}: must be one of none, bf16")
