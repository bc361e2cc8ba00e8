"""The steps after which replicas exchange their weights, and which of them. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangePlan:
    """The steps after which replicas exchange weights.

    Attributes:
        every: The steps between two exchanges of a weight.
        fragments: The parts that the weights are divided into, which are exchanged in turn; see streaming DiLoCo.
        delay: The steps that an exchange may take, which replicas train meanwhile; 0 waits for it.
        local_share: The share of a replica's own weights that it keeps where an exchange arrives late.

    Raises:
        ValueError: A value is out of range, or several exchanges would be under way at once.
    """

    every: int
    fragments: int = 1
    delay: int = 0
    local_share: float = 0.5

    def __post_init__(self) -> None:
        for name, least in (("every", 1), ("fragments", 1), ("delay", 0)):
            if type(value := getattr(self, name)) is not int or value < least:
                raise ValueError(f"{name}={value!r}: a number of {least} or more")
        if self.every % self.fragments:
            raise ValueError(
                f"every={self.every} with fragments={self.fragments}: fragments are exchanged in turn, at equal "
                f"distances: say every={-(-self.every // self.fragments) * self.fragments}, or a number of fragments "
                f"that divides {self.every}"
            )
        if self.delay >= self.period:
            raise ValueError(
                f"delay={self.delay}: an exchange begins every {self.period} steps, when the one before has ended; "
                f"say {self.period - 1} at most"
            )
        if not 0 <= self.local_share < 1:
            raise ValueError(f"local_share={self.local_share!r}: a share from 0 to less than 1")

    @property
    def period(self) -> int:
        """The steps between two exchanges, of whatever fragment."""
        return self.every // self.fragments

    def begins(self, step: int) -> int | None:
        """Return the fragment whose exchange begins after so many steps; None for none.

        Example:
            >>> plan = ExchangePlan(every=4, fragments=2)
            >>> [plan.begins(step) for step in range(1, 7)]
            [None, 0, None, 1, None, 0]
        """
        turn, rest = divmod(step, self.period)
        return None if rest else (turn - 1) % self.fragments

    def ends(self, step: int) -> int | None:
        """Return the fragment whose exchange ends after so many steps; None for none."""
        return self.begins(step - self.delay) if step > self.delay else None


def in_fragments(sizes: Sequence[int], number: int) -> list[range]:
    """Divide tensors of these sizes, in their order, into `number` ranges of about as many elements each.

    Raises:
        ValueError: There are fewer tensors.

    Example:
        >>> in_fragments([4, 4, 1, 1, 6], 2)
        [range(0, 2), range(2, 5)]
    """
    if number > len(sizes):
        raise ValueError(f"fragments={number}: the model trains {len(sizes)} tensors; say that many at most")
    found: list[range] = []
    first, left = 0, sum(sizes)
    for fragment in range(number):
        wanted, held, last = left / (number - fragment), 0, first
        room = len(sizes) - (number - fragment - 1)  # one at least for each that follows
        while last < room and (last == first or held + sizes[last] / 2 <= wanted):
            held += sizes[last]
            last += 1
        last = room if fragment == number - 1 else last
        found.append(range(first, last))
        first, left = last, left - held
    return found
