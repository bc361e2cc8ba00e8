"""The run of an Accelerator: the shared states, the handlers, and drivetrain's Accelerator."""

from logging import getLogger
from typing import Any

from drivetrain import Accelerator as DrivetrainAccelerator
from drivetrain_accelerate.accelerator.composition import compose
from drivetrain_accelerate.accelerator.run_options import RunOptions
from drivetrain_accelerate.plain_values import shown
from drivetrain_accelerate.plugins.deepspeed_plugin import deepspeed_accumulation
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
from drivetrain_accelerate.states.accelerator_state import AcceleratorState
from drivetrain_accelerate.states.gradient_state import GradientState
from drivetrain_accelerate.strictness import is_strict

logger = getLogger(__name__)


def _handler(name: str, kind: type[KwargsHandler]) -> Any:
    """Return a property for the handler of one kind; programs may set it until the run is composed."""

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

    return property(read, replace, doc=kind.__doc__)


class ComposedRun:
    """The run of an Accelerator, composed when it is first needed. Subclasses add the methods."""

    def __init__(self, options: RunOptions, state: AcceleratorState) -> None:
        self.options = options  # a program may change plugins among them until the first `prepare`
        self.state = state
        self.gradient_state = GradientState(options.accumulation)
        self.is_strict = is_strict()  # whether what Accelerate does wrong without a word is put right
        self._inner: DrivetrainAccelerator | None = None
        self._told_num_steps = 1

    @property
    def is_composed(self) -> bool:
        """True once the run is composed, and its options apply."""
        return self._inner is not None

    @property
    def inner(self) -> DrivetrainAccelerator:
        """Drivetrain's Accelerator, composed when it is first needed. Called on all ranks.

        The constructor does not compose, since programs change their plugins after they construct an Accelerator.
        """
        if self._inner is None:
            self._take_number_of_deepspeed()
            self._inner = compose(
                self.options,
                self.state,
                num_micro_batches=self.gradient_state.num_steps,
                is_strict=self.is_strict,
            )
            self._told_num_steps = self.gradient_state.num_steps
            self._inner.window.keeps_divisor = not self.is_strict
        return self._inner

    def follow_num_steps(self) -> None:
        """Apply the shared state's number of micro-batches to the next window; another Accelerator may set it."""
        num_steps = self.gradient_state.num_steps
        if num_steps != self._told_num_steps:
            self.inner.gradient_accumulation_steps = self._told_num_steps = num_steps

    def _take_number_of_deepspeed(self) -> None:
        """Copy the number of micro-batches from DeepSpeed's configuration, which has priority, to the state."""
        plugin = self.state.deepspeed_plugin
        number = None if plugin is None else deepspeed_accumulation(plugin)
        if number is None or number == self.gradient_state.num_steps:
            return
        if self.gradient_state.num_steps != 1 and self.state.is_main_process:
            logger.warning(
                "gradient_accumulation_steps=%s gives way to %s of the DeepSpeed configuration: say the same in both "
                "places, or write 'auto' into the configuration",
                self.gradient_state.num_steps,
                number,
            )
        self.gradient_state.num_steps = number

    # Programs may replace the handlers until the first `prepare`.
    autocast_handler: AutocastKwargs | None = _handler("autocast", AutocastKwargs)
    ddp_handler: DistributedDataParallelKwargs | None = _handler("ddp", DistributedDataParallelKwargs)
    scaler_handler: GradScalerKwargs | None = _handler("scaler", GradScalerKwargs)
    init_handler: InitProcessGroupKwargs | None = shown(
        "options.handlers.init", "The options of the process group, which cannot be set once it is made."
    )
    fp8_recipe_handler: FP8RecipeKwargs | None = _handler("fp8", FP8RecipeKwargs)
    ao_recipe_handler: AORecipeKwargs | None = _handler("fp8", AORecipeKwargs)
    te_recipe_handler: TERecipeKwargs | None = _handler("fp8", TERecipeKwargs)
    msamp_recipe_handler: MSAMPRecipeKwargs | None = _handler("fp8", MSAMPRecipeKwargs)
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
