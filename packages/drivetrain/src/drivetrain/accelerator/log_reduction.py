"""Reduce logged values over all ranks: one collective for all names, and no wait for the device."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, get_args
from zlib import crc32

import torch
from torch import Tensor

from drivetrain_state import CollectiveMismatchError, Context
from drivetrain_state.collectives import operations as collectives
from drivetrain_tracking import ValueNotLoggableError
from drivetrain_tracking.values.device_values import DeviceValues, copy_values

LogReduction: TypeAlias = Literal["mean", "sum", "max", "min", "per_rank"]
LoggedCount: TypeAlias = int | float | Tensor

# Every vector has this length, or is announced by one that has: so ranks that log other names still meet, and are
# told of it. A collective of 8 KiB takes as long as one of a few bytes.
_BLOCK = 1024


class LogReducer:
    """The reduction of logged values over the ranks of a context. Every method is called on all ranks."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._headers: DeviceValues[Sequence[str]] = DeviceValues()

    def reduce(
        self, values: Mapping[str, Any], how: LogReduction, count: LoggedCount | None = None
    ) -> dict[str, Any]:
        """Return the values of all ranks together: one number for each name, or one for each name and rank.

        On an accelerator, the call does not wait: the results are tensors of shape () on the device, and the error
        about different names comes from a later call.

        Args:
            values: Numbers and tensors of shape (), in nested mappings; the same names on all ranks.
            how: The reduction; `per_rank` gives `NAME/rank_0` and so on.
            count: The weight of this rank's values in a mean, such as its number of tokens; 1 by default.

        Raises:
            ValueError: The reduction is unknown, or a count is given for a reduction other than "mean".
            ValueNotLoggableError: A value is no number.
            CollectiveMismatchError: Ranks logged different names.
        """
        if how not in get_args(LogReduction):
            raise ValueError(f"reduce={how!r}: allowed are {', '.join(get_args(LogReduction))} and None")
        if count is not None and how != "mean":
            raise ValueError(f"count={count!r} with reduce={how!r}: only a mean has weights; leave count out")
        flat: dict[str, Any] = {}
        for name, number in _leaves(values, ""):
            if name in flat:
                raise ValueNotLoggableError(
                    f"values: two have the name {name!r} when nested names are joined by '/': rename one of them"
                )
            flat[name] = number
        if not flat or self._context.topology.world_size == 1:
            return {f"{name}/rank_0": flat[name] for name in flat} if how == "per_rank" else flat
        names, numbers = tuple(flat), self._vector(list(flat.values()))
        if how == "per_rank":
            return self._gather(names, numbers)
        if how == "mean":
            weight = self._vector([1.0 if count is None else count])
            # Not 0 x NaN: a rank without samples has a weight of 0, and often a NaN as its mean.
            weighed = torch.where(weight == 0, torch.zeros_like(numbers), numbers * weight)
            total = self._all_reduce(names, torch.cat([weight, weighed]), "sum")
            reduced = total[1:] / total[0]
        elif how == "min":
            reduced = -self._all_reduce(names, -numbers, "max")
        else:
            reduced = self._all_reduce(names, numbers, how)
        return dict(zip(names, reduced.unbind(), strict=True))

    def _gather(self, names: Sequence[str], numbers: Tensor) -> dict[str, Any]:
        size = self._context.topology.world_size

        def gather(numbers: Tensor) -> tuple[Tensor, Tensor]:
            rows = collectives.gather(self._context, self._pad(names, numbers)).view(size, -1)
            return rows[:, 2:], rows[:, 0].max() - rows[:, 0].min()

        rows = self._exchange(names, numbers, gather)
        return {
            f"{name}/rank_{rank}": rows[rank, index]
            for index, name in enumerate(names)
            for rank in range(size)
        }

    def _all_reduce(self, names: Sequence[str], numbers: Tensor, op: Literal["sum", "max"]) -> Tensor:
        def reduce(numbers: Tensor) -> tuple[Tensor, Tensor]:
            reduced = collectives.reduce(self._context, self._pad(names, numbers, op), op=op, over="counts")
            if op == "max":
                return reduced[2:], reduced[0] + reduced[1]
            # Of equal marks, the square of the sum is the number of ranks by the sum of the squares.
            return reduced[2:], reduced[0] * reduced[0] - self._context.ranks("counts").size * reduced[1]

        return self._exchange(names, numbers, reduce)[: len(numbers)]

    def _exchange(
        self, names: Sequence[str], numbers: Tensor, collective: Callable[[Tensor], tuple[Tensor, Tensor]]
    ) -> Tensor:
        """Return the collective's result for the numbers; the same collective compares the ranks' names.

        If the numbers need more than a block, a block of the marks goes first, and the host waits for it. Otherwise
        ranks with other names could have vectors of other lengths, which abort the collective or block it forever.
        """
        if 2 + len(numbers) > _BLOCK:
            _, difference = collective(numbers[:0])
            _check_same_names(names, difference.item())
        result, difference = collective(numbers)
        for logged, seen in self._headers.add(copy_values({"difference": difference}), names):
            _check_same_names(logged, seen["difference"])
        return result

    def _pad(self, names: Sequence[str], numbers: Tensor, op: Literal["sum", "max"] = "max") -> Tensor:
        """Return one vector: marks by which ranks compare names, the numbers, and zeros up to a whole block."""
        # 20 bits that other names mostly do not have: their square is exact in 64 bits, over all ranks.
        mark = float(crc32("\n".join(names).encode()) & 0xFFFFF)
        marks = self._vector([mark, mark**2 if op == "sum" else -mark])
        padding = numbers.new_zeros(-(2 + len(numbers)) % _BLOCK)
        return torch.cat([marks, numbers, padding])

    def _vector(self, numbers: Sequence[Any]) -> Tensor:
        """Return numbers as a vector on the context's device; 64-bit numbers stay exact. Shape (len(numbers),)."""
        device = self._context.device
        there = [isinstance(number, Tensor) and number.device == device for number in numbers]
        on_host = [
            0.0 if is_there else float(number) for number, is_there in zip(numbers, there, strict=True)
        ]
        # Pinned, so that the copy waits for nothing that the device still computes.
        pinned = torch.tensor(on_host, dtype=torch.float64, pin_memory=self._context.traits.copies_aside)
        sent = pinned.to(device, non_blocking=True)
        if not any(there):
            return sent
        return torch.stack(
            [
                number.detach().to(torch.float64) if is_there else sent[index]
                for index, (number, is_there) in enumerate(zip(numbers, there, strict=True))
            ]
        )


def _check_same_names(names: Sequence[str], difference: object) -> None:
    """Check that the marks of all ranks' names do not differ."""
    if difference != 0:
        raise CollectiveMismatchError(
            f"log({', '.join(names)}, reduce=...): another rank logged other names in the same call: log "
            "the same names, in the same order, on all ranks; StateSettings(debug=True) says what each logged"
        )


def _leaves(values: Mapping[str, Any], prefix: str) -> "list[tuple[str, Any]]":
    found: list[tuple[str, Any]] = []
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            found += _leaves(value, f"{name}/")
        elif isinstance(value, (bool, int, float)) or (
            getattr(value, "shape", None) == () and hasattr(value, "item")
        ):
            found.append((name, value if isinstance(value, Tensor) else float(value)))
        else:
            raise ValueNotLoggableError(
                f"values[{name!r}] ({type(value).__name__}) with reduce=...: only numbers and tensors of shape () "
                "can be reduced over ranks; log it in a call of its own, without reduce"
            )
    return found
