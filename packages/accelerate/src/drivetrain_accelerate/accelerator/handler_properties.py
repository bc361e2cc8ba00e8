"""The handlers of an Accelerator, and what follows from them, under the names that programs read."""

from typing import Any

from drivetrain_accelerate.accelerator.composed_run import ComposedRun
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


class HandlerProperties(ComposedRun):
    """The handlers that an Accelerator was given; programs may replace them until the first `prepare`."""

    @property
    def autocast_handler(self) -> AutocastKwargs | None:
        """The options of `autocast`."""
        return self.options.handlers.autocast

    @autocast_handler.setter
    def autocast_handler(self, handler: AutocastKwargs | None) -> None:
        self._replace("autocast", handler)

    @property
    def ddp_handler(self) -> DistributedDataParallelKwargs | None:
        """The options of DDP."""
        return self.options.handlers.ddp

    @ddp_handler.setter
    def ddp_handler(self, handler: DistributedDataParallelKwargs | None) -> None:
        self._replace("ddp", handler)

    @property
    def scaler_handler(self) -> GradScalerKwargs | None:
        """The options of fp16's loss scale."""
        return self.options.handlers.scaler

    @scaler_handler.setter
    def scaler_handler(self, handler: GradScalerKwargs | None) -> None:
        self._replace("scaler", handler)

    @property
    def init_handler(self) -> InitProcessGroupKwargs | None:
        """The options of the process group, which was made with them; it cannot be set afterwards."""
        return self.options.handlers.init

    @property
    def profile_handler(self) -> ProfileKwargs | None:
        """The options of `profile`."""
        return self.options.handlers.profile

    @profile_handler.setter
    def profile_handler(self, handler: ProfileKwargs | None) -> None:
        self.options.handlers.profile = handler  # read by each `profile`

    @property
    def fp8_recipe_handler(self) -> FP8RecipeKwargs | None:
        """The options of fp8 in the form from before there was a class for each library."""
        return self._fp8_of(FP8RecipeKwargs)

    @fp8_recipe_handler.setter
    def fp8_recipe_handler(self, handler: FP8RecipeKwargs | None) -> None:
        self._replace("fp8", handler)

    @property
    def ao_recipe_handler(self) -> AORecipeKwargs | None:
        """The options of fp8 by torchao."""
        return self._fp8_of(AORecipeKwargs)

    @ao_recipe_handler.setter
    def ao_recipe_handler(self, handler: AORecipeKwargs | None) -> None:
        self._replace("fp8", handler)

    @property
    def te_recipe_handler(self) -> TERecipeKwargs | None:
        """The options of fp8 by Transformer Engine."""
        return self._fp8_of(TERecipeKwargs)

    @te_recipe_handler.setter
    def te_recipe_handler(self, handler: TERecipeKwargs | None) -> None:
        self._replace("fp8", handler)

    @property
    def msamp_recipe_handler(self) -> MSAMPRecipeKwargs | None:
        """The options of fp8 by MS-AMP, which is refused where it would run."""
        return self._fp8_of(MSAMPRecipeKwargs)

    @msamp_recipe_handler.setter
    def msamp_recipe_handler(self, handler: MSAMPRecipeKwargs | None) -> None:
        self._replace("fp8", handler)

    @property
    def has_fp8_handler(self) -> bool:
        """True if the program gave options of fp8."""
        return self.options.handlers.fp8 is not None

    @property
    def fp8_enabled(self) -> bool:
        """True if the run computes in fp8."""
        return self.state.mixed_precision == "fp8"

    @property
    def delayed_fp8_autocast(self) -> bool:
        """False: models compute in fp8 from their preparation on."""
        return False

    @property
    def native_amp(self) -> bool:
        """True if autocast computes in the run's precision, as with every precision but "no"."""
        return self.state.mixed_precision != "no"

    @property
    def has_lomo_optimizer(self) -> bool:
        """False: LOMO's optimizers are refused."""
        return False

    def _fp8_of(self, kind: type[Any]) -> Any:
        """Return the options of fp8 if they are of a class; None if not.

        `FP8RecipeKwargs`, the oldest class, derives from those of two libraries. It counts as neither of them.
        """
        held = self.options.handlers.fp8
        is_of_class = type(held) is kind or (isinstance(held, kind) and not isinstance(held, FP8RecipeKwargs))
        return held if is_of_class else None

    def _replace(self, name: str, handler: KwargsHandler | None) -> None:
        if self._inner is not None:
            raise RuntimeError(
                f"{name} handler = {handler!r}: the run is composed from its handlers at the first prepare(); set it "
                "before, or give it to Accelerator(kwargs_handlers=[...])"
            )
        setattr(self.options.handlers, name, handler)
