"""The protocol of tensors that every rank must hold alike for a save to be committed."""

from collections.abc import Sequence
from typing import NoReturn, Protocol

from torch import Tensor


class Replicas(Protocol):
    """The tensors of this rank that other ranks hold too, such as a model's weights under data parallelism.

    Call order:

    1. `tensors`, on all ranks by the main thread, as the save begins; the tensors must not change until `sums` ends.
    2. `sums`, on all ranks by the thread that copies tensors for the save.
    3. `explain`, on rank 0, if the sums of the ranks of a group differ; then `refuse` on all ranks.
    """

    @property
    def groups(self) -> Sequence[Sequence[int]]:
        """The ranks that hold the same tensors, in one or several groups, which hold different ones."""
        ...

    @property
    def tensors(self) -> Sequence[Tensor]:
        """The tensors of this rank; empty once `sums` has read them."""
        ...

    def sums(self) -> Tensor:
        """Return one checksum of the bits of each tensor, int64 in host memory.

        The first call reads the tensors, on the current streams, and waits for their devices.
        """
        ...

    def explain(self, by_rank: Sequence[Sequence[int]]) -> str:
        """Return the message of the error, from the sums of each rank."""
        ...

    def refuse(self, told: str) -> NoReturn:
        """Raise the error, with the message that `explain` returned on rank 0."""
        ...
