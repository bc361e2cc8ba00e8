"""The backend for training on one device."""

import logging
from collections.abc import Mapping

from drivetrain_backends.composed.backend import ComposedBackend
from drivetrain_backends.composed.state_layout import StateLayout
from drivetrain_backends.composed.strategy import Strategy
from drivetrain_backends.composed.transforms import on_one_device
from drivetrain_backends.gradients.reducer import ParameterGradients
from drivetrain_backends.protocol import AutoValue

logger = logging.getLogger(__name__)


class SingleBackend(ComposedBackend):
    """A backend for one process and one device; the model stays the same object.

    Raises:
        ValueError: There are several processes, each of which would train its own model.
    """

    def compose(self) -> Strategy:
        """Return the strategy: nothing is wrapped, averaged or divided."""
        if (count := self.context.ranks("counts").size) > 1:
            raise ValueError(
                f"backend='single' with {count} processes whose gradients add up (data x shard x context): each "
                "would train a separate model; say ddp, fsdp or deepspeed, or --num-processes 1"
            )
        if self.policy.dtypes.reduce is not None:
            logger.warning(
                "precision.reduce_dtype=%r has no effect: one process has no gradients to add up",
                self.policy.dtypes.said()["reduce_dtype"],
            )
        return Strategy(
            transforms=on_one_device(self.context, self.policy, self.note_forward),
            gradients=ParameterGradients(self.scaler),
            layout=StateLayout(self.context),
        )

    def applied(self) -> Mapping[str, object]:
        """Return the values in force; see `Backend.applied`."""
        unused = AutoValue(value=None, reason="one process has no gradients to add up")
        return {**super().applied(), "reduce_dtype": None if self.policy.dtypes.reduce is None else unused}
