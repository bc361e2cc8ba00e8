"""Count the floating point operations of one step by torch's own counter."""

from drivetrain_throughput.flops.compat import ModelFlopCounter


class StepFlops:
    """A counter of the operations that a model and its gradients need, for model FLOPs utilisation (MFU).

    The counter leaves out forwards repeated inside backward, as in activation checkpointing; hardware FLOPs
    utilisation (HFU) would include them. It runs only inside forward and backward: its torch dispatch mode must not
    overlap the user's modes.

    Attributes:
        total: The floating point operations counted so far, on this rank.
    """

    def __init__(self) -> None:
        self.total = 0
        self._mode: ModelFlopCounter | None = None
        self._depth = self._forward = self._weighted = 0

    @property
    def num_parts(self) -> float:
        """The number of ranks among which the operations of forward are divided, on average; 1 if there are none."""
        return self._weighted / self._forward if self._forward else 1.0

    def begin(self, *, is_backward: bool = False) -> None:
        """Begin to count operations; calls may nest."""
        self._depth += 1
        if self._depth == 1:
            self._mode = ModelFlopCounter(is_in_backward=is_backward)
            self._mode.__enter__()

    def end(self) -> None:
        """End the innermost `begin`."""
        self._depth -= 1
        if self._depth == 0 and self._mode is not None:
            self._mode.__exit__(None, None, None)
            self.total += (total := self._mode.get_total_flops())
            if not self._mode.is_in_backward:
                self._forward += total
                self._weighted += self._mode.num_weighted
            self._mode = None
