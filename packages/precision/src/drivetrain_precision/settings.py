"""The `precision` section of the settings: fp16's loss scale, skipped steps, fp8, and the dtypes of models."""

from dataclasses import dataclass, field
from math import inf
from typing import Any, Literal

_FP16, _FP8 = "run.mixed_precision=fp16", "run.mixed_precision=fp8"


def _setting(default: Any, text: str, *, needs: str | None = None) -> Any:
    """Return a field with its help text and with the setting that it `needs` to take effect."""
    return field(default=default, metadata={"help": text} | ({"needs": needs} if needs else {}))


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionSettings:
    """The loss scale of fp16 training, the limit of skipped steps, fp8, and the dtypes of a model.

    bf16 and fp32 have no loss scale. Their steps are skipped only with `run.on_nonfinite="skip"`.

    Example:
        >>> PrecisionSettings(param_dtype="bf16", keep_fp32=("*.norm",)).keep_fp32
        ('*.norm',)
    """

    initial_scale: float = _setting(
        65536.0, "Loss scale of the first step; halved at each overflow.", needs=_FP16
    )
    growth_factor: float = _setting(
        2.0, "Factor of the scale after growth_interval steps without overflow.", needs=_FP16
    )
    backoff_factor: float = _setting(0.5, "Factor of the scale after a step that overflowed.", needs=_FP16)
    growth_interval: int = _setting(
        2000, "Number of optimizer steps without overflow before the scale grows.", needs=_FP16
    )
    check_half: bool = _setting(
        False, "Look in the first step for softmaxes, norms and losses computed in half precision."
    )
    fp8_recipe: str = _setting(
        "auto",
        "Recipe of mixed_precision=fp8, such as torchao_rowwise or te_current; auto: the best that the "
        "device and the installed libraries can run.",
        needs=_FP8,
    )
    fp8_fallback: Literal["none", "bf16"] = _setting(
        "none",
        "What to train in where fp8 cannot run: none stops with an error, bf16 goes on in bf16.",
        needs=_FP8,
    )
    fp8_exclude: tuple[str, ...] = _setting(
        (),
        "Patterns of the names of linear layers that stay in bf16 under fp8, such as *.router.",
        needs=_FP8,
    )
    fp8_skip_ends: bool = _setting(
        True, "Whether a model's first and last linear layer stay in bf16 under fp8.", needs=_FP8
    )
    param_dtype: Literal["fp32", "bf16"] | None = _setting(
        None,
        "Dtype that parameters, gradients and optimizer states are held in between steps; unset: the "
        "model's own.",
    )
    reduce_dtype: Literal["fp32", "bf16", "fp16"] | None = _setting(
        None,
        "Dtype in which ranks add up gradients; unset: the gradients' own, but fp32 under fsdp and with "
        "param_dtype=bf16.",
    )
    output_dtype: Literal["fp32", "bf16", "fp16"] | None = _setting(
        None, "Dtype that a model's outputs are cast to; unset: as computed."
    )
    buffer_dtype: Literal["fp32", "bf16", "fp16"] | None = _setting(
        None, "Dtype that buffers are held in; unset: the model's own."
    )
    keep_fp32: tuple[str, ...] = _setting(
        (),
        "Patterns of modules that are held and computed in fp32, by dotted name or class, such as *.router.",
    )
    weight_update: Literal["nearest", "stochastic", "kahan"] | None = _setting(
        None,
        "Rounding of updates of weights in bf16: nearest loses small ones, stochastic rounds at random, "
        "kahan keeps what was rounded off; unset: kahan with param_dtype=bf16.",
    )
    # Below 1, small gradients underflow that would not without a scale: apart from losses that are huge sums, an
    # overflow there comes from the model. DeepSpeed and Megatron have the same floor.
    min_scale: float = _setting(
        1.0,
        "Smallest loss scale; gradients that overflow at it in two steps one after another end the run.",
        needs=_FP16,
    )
    # From 2**16 to the floor are 16 halvings; 64 leave room for a scale that has grown, and for slower backoffs.
    max_skipped_steps: int | None = _setting(
        64,
        "Optimizer steps skipped one after another, as their gradients are not finite, that end the run; "
        "unset: any number.",
        needs="run.mixed_precision=fp16 or run.on_nonfinite=skip",
    )
    watch_underflow: int | None = _setting(
        None,
        "Count by layer the gradients that underflow, and log the table every so many optimizer steps; "
        "costs several passes over all activations. Unset: not counted.",
    )

    def __post_init__(self) -> None:
        """Raise ValueError for a value outside its range; the message begins with the field's name."""
        _check_types(self)
        if not 0 < self.initial_scale < inf:
            raise ValueError(f"initial_scale={self.initial_scale!r}: must be above 0 and finite")
        if not self.growth_factor > 1:
            raise ValueError(f"growth_factor={self.growth_factor!r}: must be above 1")
        if not 0 < self.backoff_factor < 1:
            raise ValueError(f"backoff_factor={self.backoff_factor!r}: must lie between 0 and 1")
        if self.growth_interval < 1:
            raise ValueError(f"growth_interval={self.growth_interval!r}: must be at least 1")
        if self.fp8_fallback not in ("none", "bf16"):
            raise ValueError(f"fp8_fallback={self.fp8_fallback!r}: must be one of none, bf16")
        if not self.min_scale > 0:
            raise ValueError(f"min_scale={self.min_scale!r}: must be above 0")
        if self.min_scale > self.initial_scale:
            raise ValueError(
                f"min_scale={self.min_scale!r}: must be at most initial_scale={self.initial_scale!r}, which is where "
                "the scale begins"
            )
        for name in ("max_skipped_steps", "watch_underflow"):
            value: int | None = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value!r}: must be at least 1, or None")
        _check_dtypes(self)


def _check_types(settings: PrecisionSettings) -> None:
    """Raise ValueError for values of wrong types, which settings built in code may have."""
    for name in ("check_half", "fp8_skip_ends"):
        if type(getattr(settings, name)) is not bool:
            raise ValueError(f"{name}={getattr(settings, name)!r}: must be True or False")
    for name in ("growth_interval", "max_skipped_steps", "watch_underflow"):
        value = getattr(settings, name)
        if value is not None and type(value) is not int:
            raise ValueError(f"{name}={value!r}: must be an integer")
    for name in ("fp8_exclude", "keep_fp32"):
        patterns = getattr(settings, name)
        if isinstance(patterns, str) or not all(isinstance(each, str) for each in patterns):
            raise ValueError(f"{name}={patterns!r}: must be a tuple of patterns, such as ('*.router',)")


def _check_dtypes(settings: PrecisionSettings) -> None:
    allowed = {
        "param_dtype": ("fp32", "bf16"),
        **dict.fromkeys(("reduce_dtype", "output_dtype", "buffer_dtype"), ("fp32", "bf16", "fp16")),
        "weight_update": ("nearest", "stochastic", "kahan"),
    }
    for name, values in allowed.items():
        value = getattr(settings, name)
        if name == "param_dtype" and value == "fp16":
            raise ValueError(
                "param_dtype='fp16': weights are not held in fp16, whose narrow exponent loses small updates and "
                "gradients; say mixed_precision='fp16', which holds them in fp32, or param_dtype='bf16'"
            )
        if value is not None and value not in values:
            raise ValueError(f"{name}={value!r}: must be one of {', '.join(values)}")
    if any(not pattern for pattern in settings.keep_fp32):
        raise ValueError(f"keep_fp32={settings.keep_fp32!r}: a pattern must not be empty")
