"""Choose a precision: map a mode and a device to a frozen policy."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from drivetrain_precision.dtypes.dtype_policy import DtypePolicy, choose_dtypes
from drivetrain_precision.errors import PrecisionError
from drivetrain_precision.fp8.protocol import Fp8Recipe
from drivetrain_precision.fp8.registry import as_recipe, check_recipe_name, choose_recipe
from drivetrain_precision.settings import PrecisionSettings
from drivetrain_precision.support import MODES, Support, supported_modes

_BEST_FIRST = ("bf16", "fp16", "no")
_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.bfloat16}  # fp8: outside of recipes


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A precision policy: the dtype to compute in, and the reason for it.

    Attributes:
        mode: The precision: "no" (fp32), "fp16", "bf16" or "fp8".
        autocast_dtype: The dtype of matrix products under autocast; None without autocast.
        scaling: The settings of the loss scale, which fp16's narrow exponent requires; None in other modes.
        reason: The reason for the choice, as a sentence for the effective plan.
        recipe: The recipe by which linear layers compute in 8 bits or fewer; None unless the mode is "fp8".
        dtypes: The dtypes of parameters, reductions and outputs.
        settings: The whole section, with settings for every mode, such as the limit of skipped steps.
    """

    mode: str
    autocast_dtype: torch.dtype | None
    scaling: PrecisionSettings | None
    reason: str
    recipe: Fp8Recipe | None = None
    dtypes: DtypePolicy = field(default_factory=DtypePolicy)
    settings: PrecisionSettings = field(default_factory=PrecisionSettings)

    @property
    def mode_beside_recipe(self) -> str:
        """The precision of operations outside a recipe: "bf16" in mode "fp8", else the mode."""
        return "bf16" if self.mode == "fp8" else self.mode


def choose_policy(
    mode: str,
    device: torch.device,
    settings: PrecisionSettings | None = None,
    *,
    recipe: Fp8Recipe | str | None = None,
) -> Policy:
    """Choose the precision for `device`; the policy's `reason` explains the choice.

    Args:
        mode: The mode: "no" (fp32), "fp16", "bf16", "fp8" or "auto" (the first of bf16, fp16 and fp32 that the
            hardware supports natively).
        device: The device that training runs on.
        settings: The `precision` section: fp16's loss scale, skipped steps, fp8, and the dtypes of models.
        recipe: The recipe of mode "fp8" or its name; None for the recipe of the settings.

    Raises:
        PrecisionError: The mode is unknown, or the device does not support it; the message lists the supported modes.
            Or the settings' dtypes contradict the mode, or a recipe's name is unknown.

    Example:
        >>> choose_policy("bf16", torch.device("cpu")).mode
        'bf16'
    """
    support, settings = supported_modes(device), settings or PrecisionSettings()
    check_recipe_name(settings.fp8_recipe)
    if mode == "fp8":
        if isinstance(recipe, str):
            settings, recipe = _add_recipe_name(settings, recipe), None
        return _fp8_policy(device, settings, None if recipe is None else as_recipe(recipe), support)
    if recipe is not None:
        name = recipe if isinstance(recipe, str) else as_recipe(recipe).name
        raise PrecisionError(f"fp8_recipe={name!r} with mixed_precision={mode!r}: say mixed_precision='fp8'")
    if mode == "auto":
        chosen = next(name for name in _BEST_FIRST if support[name].level == "native")
        weaker = [name for name in _BEST_FIRST if support[name].level != "native"]
        passed_over = [f"{name}: {support[name].reason}" for name in weaker]
        reason = "; ".join([f"auto chose {chosen!r}: {support[chosen].reason}", *passed_over])
        return _policy(chosen, device, settings, reason)
    if mode not in MODES:
        allowed = ", ".join(map(repr, (*MODES, "fp8")))
        raise PrecisionError(f"mixed_precision={mode!r}: must be one of {allowed} or 'auto'")
    if support[mode].level == "none":
        able = [name for name in MODES if support[name].level != "none"]
        raise PrecisionError(
            f"mixed_precision={mode!r}: {device} cannot compute in it ({support[mode].reason}); "
            f"it can do {', '.join(map(repr, able))}, and 'auto' picks the best of these"
        )
    return _policy(mode, device, settings, support[mode].reason)


def _add_recipe_name(settings: PrecisionSettings, recipe: str) -> PrecisionSettings:
    """Return the settings with the name of the recipe given in code."""
    if recipe == "auto":
        return settings
    check_recipe_name(recipe)
    if settings.fp8_recipe not in ("auto", recipe):
        raise PrecisionError(
            f"precision.fp8_recipe={settings.fp8_recipe!r}, and fp8_recipe={recipe!r} is given in code; say one"
        )
    return replace(settings, fp8_recipe=recipe)


def _fp8_policy(
    device: torch.device,
    settings: PrecisionSettings,
    recipe: Fp8Recipe | None,
    support: Mapping[str, Support],
) -> Policy:
    """Return the policy of a recipe; layers that the recipe does not convert compute in bf16."""
    choice = choose_recipe(device, settings, recipe)
    bf16 = support["bf16"]
    if choice.recipe is None:
        if settings.fp8_fallback == "bf16" and bf16.level != "none":
            return _policy("bf16", device, settings, f"fp8_fallback: {choice.reason}")
        raise PrecisionError(f"mixed_precision='fp8': {choice.reason}")
    if bf16.level == "none":
        raise PrecisionError(f"mixed_precision='fp8': other layers compute in bf16, and {bf16.reason}")
    return _policy("fp8", device, settings, choice.reason, choice.recipe)


def _policy(
    mode: str, device: torch.device, settings: PrecisionSettings, reason: str, recipe: Fp8Recipe | None = None
) -> Policy:
    return Policy(
        mode=mode,
        autocast_dtype=_DTYPES.get(mode),
        scaling=settings if mode == "fp16" else None,
        reason=reason,
        recipe=recipe,
        settings=settings,
        dtypes=choose_dtypes(mode, device, settings),
    )
