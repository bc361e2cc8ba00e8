"""The backend for training on one device."""

import logging
from typing import Any

from drivetrain_backends.gradients.accumulation import AccumulationWindow
from drivetrain_backends.torch.backend import TorchBackend
from drivetrain_precision import Policy
from drivetrain_state import Context

logger = logging.getLogger(__name__)


class SingleBackend(TorchBackend):
    """A backend for one process and one device; the model stays the same object.

    Raises:
        ValueError: There are several processes, each of which would train its own model.
    """

    def __init__(
        self, context: Context, policy: Policy, *, window: AccumulationWindow, settings: Any = None
    ) -> None:
        if (count := context.topology.world_size) > 1:
            raise ValueError(
                f"backend='single' with {count} processes: each would train a separate model, and no gradient is "
                "averaged; say ddp, fsdp or deepspeed, or --num-processes 1"
            )
        super().__init__(context, policy, window=window, settings=settings)
        if policy.dtypes.reduce is not None:
            logger.warning(
                "precision.reduce_dtype=%r has no effect: one process has no gradients to add up",
                policy.dtypes.said()["reduce_dtype"],
            )
