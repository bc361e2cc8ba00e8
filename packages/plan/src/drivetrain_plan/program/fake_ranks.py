"""Ranks that do not exist: what one rank sends to them is counted, and what they would send has no data."""

from collections.abc import Sequence

from torch import Tensor

from drivetrain_plan.hardware import Collective
from drivetrain_plan.program.tally import StepTally
from drivetrain_state.mesh import View


class FakeRanks:
    """The first of some ranks that divide a model, the others of which do not exist; see `TensorRanks`."""

    def __init__(self, size: int, view: View) -> None:
        self.rank, self.size = 0, size
        self.tally: StepTally | None = None  # that counts what is sent; None for none yet
        self._view: View = view

    def add_up(self, tensor: Tensor) -> None:
        """Leave the tensor as it is."""
        self._send("all_reduce", tensor)

    def join(self, tensor: Tensor, dim: int, sizes: tuple[int, ...]) -> Tensor:
        """Return a tensor of the shape of all ranks' joined."""
        found = tensor.new_empty(self.size, *tensor.shape).movedim(0, dim).flatten(dim, dim + 1)
        self._send("all_gather", found)
        return found if len(set(sizes)) == 1 else found.narrow(dim, 0, sum(sizes)).contiguous()

    def exchange(
        self, tensor: Tensor, sent: Sequence[int] | None = None, received: Sequence[int] | None = None
    ) -> Tensor:
        """Return as many rows as this rank would receive."""
        del sent
        self._send("all_to_all", tensor)
        return tensor.new_empty(self.size if received is None else sum(received), *tensor.shape[1:])

    def meet(self, place: str, by: str) -> None:
        """Wait for nobody."""

    def _send(self, kind: Collective, tensor: Tensor) -> None:
        if self.tally is not None:
            self.tally.send(self._view, kind, tensor.numel() * tensor.itemsize)
