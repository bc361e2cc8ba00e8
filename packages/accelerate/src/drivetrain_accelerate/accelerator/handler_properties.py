"""The handlers of an Accelerator, and what follows from them, under the names that programs read."""

from typing import Any

from drivetrain_accelerate.accelerator.composed_run import ComposedRun, shown
from drivetrain_accelerate.plugins.fp8_recipes import (
    AORecipeKwargs,
    FP8RecipeKwargs,
    MSAMPRecipeKwargs,
    TERecipeKwargs,
)
from drivetrain_accelerate.plugins.kwargs_handlers import (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    ProfileKwargs,
)


def _handler(name: str, meaning: str, *, kind: type[KwargsHandler] = KwargsHandler) -> Any:
    """Return a property of a handler, which programs may set until the run is composed.

    It is None unless the handler is of a kind.
    """

    def read(run: Any) -> Any:
        held = getattr(run.options.handlers, name)
        # `FP8RecipeKwargs`, the oldest class, derives from those of two libraries, and counts as neither of them.
        is_older = isinstance(held, FP8RecipeKwargs) and kind is not FP8RecipeKwargs
        return held if isinstance(held, kind) and not is_older else None

    def replace(run: Any, handler: KwargsHandler | None) -> None:
        if run.is_composed:
            raise RuntimeError(
                f"{name} handler = {handler!r}: the run is composed from its handlers at the first prepare(); set it "
                "before, or give it to Accelerator(kwargs_handlers=[...])"
            )
        setattr(run.options.handlers, name, handler)

    return property(read, replace, doc=meaning)


class HandlerProperties(ComposedRun):
    """The handlers that an Accelerator was given; programs may replace them until the first `prepare`."""

    autocast_handler: AutocastKwargs | None = _handler("autocast", "The options of `autocast`.")
    ddp_handler: DistributedDataParallelKwargs | None = _handler("ddp", "The options of DDP.")
    scaler_handler: GradScalerKwargs | None = _handler("scaler", "The options of fp16's loss scale.")
    init_handler: InitProcessGroupKwargs | None = shown(
        "options.handlers.init", "The options of the process group, which cannot be set once it is made."
    )
    fp8_recipe_handler: FP8RecipeKwargs | None = _handler(
        "fp8", "The options of fp8 without a library's own class.", kind=FP8RecipeKwargs
    )
    ao_recipe_handler: AORecipeKwargs | None = _handler(
        "fp8", "The options of fp8 by torchao.", kind=AORecipeKwargs
    )
    te_recipe_handler: TERecipeKwargs | None = _handler(
        "fp8", "The options of fp8 by Transformer Engine.", kind=TERecipeKwargs
    )
    msamp_recipe_handler: MSAMPRecipeKwargs | None = _handler(
        "fp8", "The options of fp8 by MS-AMP, which is refused where it would run.", kind=MSAMPRecipeKwargs
    )
    delayed_fp8_autocast = False  # models compute in fp8 from their preparation on
    has_lomo_optimizer = False  # LOMO's optimizers are refused

    profile_handler: ProfileKwargs | None = shown(
        "options.handlers.profile", "The options of `profile`, which reads them each time.", is_settable=True
    )

    @property
    def has_fp8_handler(self) -> bool:
        """True if the program gave options of fp8."""
        return self.options.handlers.fp8 is not None

    @property
    def fp8_enabled(self) -> bool:
        """True if the run computes in fp8."""
        return self.state.mixed_precision == "fp8"

    @property
    def native_amp(self) -> bool:
        """True if autocast computes in the run's precision, as with every precision but "no"."""
        return self.state.mixed_precision != "no"
