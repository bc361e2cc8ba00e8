"""Early stopping: the end of training when a metric no longer improves, decided alike on all ranks."""

from collections.abc import Mapping
from math import inf
from typing import Any, Literal

from drivetrain.accelerator.accelerator import Accelerator
from drivetrain_state import broadcast_object


class EarlyStopping:
    """Tell when a metric has not improved for a number of evaluations. Checkpoints of the run keep it.

    Args:
        accelerator: The Accelerator of the run; made on all ranks, before `load_state`.
        patience: The evaluations without an improvement after which training stops, at least 1.
        min_delta: The change, at least 0, that a value must exceed to be an improvement.
        mode: "min" if lower values are better, such as losses; "max" for scores.
        name: The name in checkpoints, where a run has several.

    Attributes:
        best: The best value so far; infinite before the first.
        num_bad: The number of evaluations since the best value.

    Raises:
        ValueError: A number is out of range, `mode` is neither "min" nor "max", or the name is taken.

    Example:
        >>> stopping = EarlyStopping(Accelerator(cpu=True), patience=2)
        >>> [stopping.should_stop(loss) for loss in (0.5, 0.4, 0.45, float("nan"))]
        [False, False, False, True]
    """

    def __init__(
        self,
        accelerator: Accelerator,
        *,
        patience: int = 3,
        min_delta: float = 0.0,
        mode: Literal["min", "max"] = "min",
        name: str = "early_stopping",
    ) -> None:
        if not (patience >= 1 and min_delta >= 0) or mode not in ("min", "max"):
            raise ValueError(
                f"EarlyStopping(patience={patience!r}, min_delta={min_delta!r}, mode={mode!r}): patience is at least "
                "1, min_delta at least 0, and mode 'min' or 'max'"
            )
        self.patience, self.min_delta, self.mode = patience, min_delta, mode
        self.best, self.num_bad = inf if mode == "min" else -inf, 0
        self._context = accelerator.context
        named: dict[str, Any] = {name: self}
        accelerator.register_for_checkpointing(**named)

    def should_stop(self, value: float) -> bool:
        """Count an evaluation, and return whether training stops. Called on all ranks; rank 0's value decides.

        Args:
            value: The metric; NaN is no improvement.
        """
        value = broadcast_object(self._context, float(value))
        sign = 1 if self.mode == "min" else -1
        if sign * (self.best - value) > self.min_delta:
            self.best, self.num_bad = value, 0
        else:
            self.num_bad += 1
        return self.num_bad >= self.patience

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run goes on with."""
        return {"best": self.best, "num_bad": self.num_bad}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a result of `state_dict`."""
        self.best, self.num_bad = state_dict["best"], state_dict["num_bad"]
