"""The run that an Accelerator's methods act on: the shared states, and drivetrain's Accelerator."""

from logging import getLogger
from operator import attrgetter
from typing import Any

from drivetrain import Accelerator as DrivetrainAccelerator
from drivetrain_accelerate.accelerator.composition import compose
from drivetrain_accelerate.accelerator.run_options import RunOptions
from drivetrain_accelerate.plugins.translate_deepspeed import deepspeed_accumulation
from drivetrain_accelerate.states.accelerator_state import AcceleratorState
from drivetrain_accelerate.states.gradient_state import GradientState
from drivetrain_accelerate.strictness import is_strict

logger = getLogger(__name__)


def shown(path: str, meaning: str, *, is_settable: bool = False) -> Any:
    """Return a property of an Accelerator, whose value stands at a path of dots from it."""
    holder, _, name = path.rpartition(".")

    def write(run: Any, value: Any) -> None:
        setattr(attrgetter(holder)(run), name, value)

    return property(attrgetter(path), write if is_settable else None, doc=meaning)


class ComposedRun:
    """The run of an Accelerator, whose methods the classes below it add: composed when it is first needed.

    Attributes:
        options: The arguments of the program; plugins among them may be changed until the first `prepare`.
        state: The ranks, precision and plugins of the run.
        gradient_state: The place of the run between two steps.
        is_strict: Whether what Accelerate does wrong without a word is put right.
    """

    def __init__(self, options: RunOptions, state: AcceleratorState) -> None:
        self.options = options
        self.state = state
        self.gradient_state = GradientState(options.accumulation)
        self.is_strict = is_strict()
        self._inner: DrivetrainAccelerator | None = None
        self._told_num_steps = 1

    @property
    def is_composed(self) -> bool:
        """True once the run is composed, and its options apply."""
        return self._inner is not None

    @property
    def inner(self) -> DrivetrainAccelerator:
        """Drivetrain's Accelerator, composed when it is first needed. Called on all ranks.

        Not earlier: programs change their plugins after they construct an Accelerator.
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
        """Have the next window hold as many micro-batches as the state says; another Accelerator may have set it."""
        num_steps = self.gradient_state.num_steps
        if num_steps != self._told_num_steps:
            self.inner.gradient_accumulation_steps = self._told_num_steps = num_steps

    def _take_number_of_deepspeed(self) -> None:
        """Tell the state the number of micro-batches that DeepSpeed's configuration says, which comes first."""
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
