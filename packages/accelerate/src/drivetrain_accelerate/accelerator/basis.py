"""What all methods of an Accelerator stand on: the shared states, and drivetrain's Accelerator."""

from drivetrain import Accelerator as DrivetrainAccelerator
from drivetrain_accelerate.accelerator.composition import compose
from drivetrain_accelerate.accelerator.run_options import RunOptions
from drivetrain_accelerate.states.accelerator_state import AcceleratorState
from drivetrain_accelerate.states.gradient_state import GradientState


class Basis:
    """The base of the classes that an Accelerator inherits its methods from.

    Args:
        options: What the program says.
        state: The state that all Accelerators share.

    Attributes:
        options: What the program says; plugins among it may be changed until the first `prepare`.
        state: The ranks, precision and plugins of the run.
        gradient_state: Where the run is between two steps.
    """

    def __init__(self, options: RunOptions, state: AcceleratorState) -> None:
        self.options = options
        self.state = state
        self.gradient_state = GradientState(options.accumulation)
        self._inner: DrivetrainAccelerator | None = None

    @property
    def inner(self) -> DrivetrainAccelerator:
        """Drivetrain's Accelerator, composed when it is first needed. Called on all ranks.

        Not earlier: programs change their plugins after they construct an Accelerator.
        """
        if self._inner is None:
            self._inner = compose(self.options, self.state.num_processes)
        return self._inner
