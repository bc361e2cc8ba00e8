"""The base of an Accelerator's methods: the shared states, and drivetrain's Accelerator."""

from drivetrain import Accelerator as DrivetrainAccelerator
from drivetrain_accelerate.accelerator.composition import compose
from drivetrain_accelerate.accelerator.run_options import RunOptions
from drivetrain_accelerate.states.accelerator_state import AcceleratorState
from drivetrain_accelerate.states.gradient_state import GradientState
from drivetrain_accelerate.strictness import is_strict


class Basis:
    """The base of the classes that an Accelerator inherits its methods from.

    Args:
        options: The arguments of the program.
        state: The state that all Accelerators share.

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

    @property
    def inner(self) -> DrivetrainAccelerator:
        """Drivetrain's Accelerator, composed when it is first needed. Called on all ranks.

        Not earlier: programs change their plugins after they construct an Accelerator.
        """
        if self._inner is None:
            self._inner = compose(
                self.options,
                deepspeed_plugin=self.state.deepspeed_plugin,
                num_processes=self.state.num_processes,
                is_strict=self.is_strict,
            )
            self._inner.window.keeps_divisor = not self.is_strict
        return self._inner
