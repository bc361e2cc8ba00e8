"""The tensors that each rank holds in a save. Ranks exchange the tensors' names once, then a number per tensor."""

import json
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import xxhash

from drivetrain_checkpoint.errors import StateError
from drivetrain_checkpoint.planning.write_plan import AvailableBoxes, Held, TensorName


@dataclass(frozen=True, slots=True)
class MainNames:
    """The names of the tensors that rank 0 describes, by part; other ranks may hold pieces of these tensors."""

    names: dict[str, list[str]]  # of models and replicated states, in the order of the state
    aliases: frozenset[TensorName]  # further names of these, such as those of tied weights


@dataclass(frozen=True, slots=True)
class RankHoldings:
    """The holdings of a rank, in the form that it sends to the other ranks."""

    held: Held  # among the tensors that rank 0 names
    own: dict[TensorName, AvailableBoxes]
    unknown: TensorName | None  # a tensor that it holds a part of and rank 0 does not name


@dataclass(frozen=True, slots=True)
class Holdings:
    """The boxes that a rank can write, by tensor, in the order of the state.

    Attributes:
        shared: The boxes of models and replicated states; rank 0 lists all tensors of these.
        own: The boxes of the rank's own states.
        aliases: On rank 0, further names of tensors in `shared`, such as of tied weights; empty on other ranks.
    """

    shared: dict[TensorName, AvailableBoxes] = field(default_factory=dict[TensorName, AvailableBoxes])
    own: dict[TensorName, AvailableBoxes] = field(default_factory=dict[TensorName, AvailableBoxes])
    aliases: set[TensorName] = field(default_factory=set[TensorName])

    def digest(self) -> str:
        """Return a hash that is equal for equal `shared` and `own`."""
        content = xxhash.xxh3_128()
        for tensors in (self.shared, self.own):
            held = _in_columns(tensors.values())
            content.update(json.dumps(_by_part(tensors)).encode())
            content.update(repr((held.kinds, list(held.kind_of))).encode())
        return content.hexdigest()

    def main_names(self) -> MainNames:
        """Return the names of tensors to send to the other ranks. Called on rank 0."""
        return MainNames(_by_part(self.shared), frozenset(self.aliases))

    def told(self, main: MainNames) -> RankHoldings:
        """Return this rank's holdings to send to the other ranks, with tensors numbered as in rank 0's names."""
        names = _listed(main.names)
        known = main.aliases.union(names)
        return RankHoldings(
            held=_in_columns(map(self.shared.get, names)),
            own=self.own,
            unknown=next((name for name in self.shared if name not in known), None),
        )


def joined(main: MainNames, ranks: Sequence[RankHoldings]) -> tuple[list[TensorName], list[Held]]:
    """Return the names of all tensors of a save and each rank's boxes, as arguments of `plan_writes`. Pure.

    Raises:
        StateError: A rank's models or replicated states hold a tensor that rank 0's state lacks: no load would
            restore the tensor.
    """
    for rank, told in enumerate(ranks):
        if told.unknown is not None:
            raise StateError(
                f"rank {rank} has a part of {told.unknown.name!r} ({told.unknown.part}), and rank 0's state has no "
                "such tensor: give all ranks a state of the same names, or what a rank has of its own as per_rank"
            )
    own = [name for told in ranks for name in told.own]
    held: list[Held] = []
    for told in ranks:  # the own tensors of all ranks come behind those that rank 0 names
        behind, first = _in_columns(map(told.own.get, own)), len(told.held.kinds)
        kind_of = array("i", (index if index < 0 else first + index for index in behind.kind_of))
        held.append(Held(told.held.kinds + behind.kinds, array("i", told.held.kind_of) + kind_of))
    return _listed(main.names) + own, held


def _in_columns(tensors: Iterable[AvailableBoxes | None]) -> Held:
    numbers: dict[AvailableBoxes, int] = {}
    kind_of = array("i", (-1 if one is None else numbers.setdefault(one, len(numbers)) for one in tensors))
    return Held(tuple(numbers), kind_of)


def _by_part(tensors: Iterable[TensorName]) -> dict[str, list[str]]:
    names: dict[str, list[str]] = {}
    for part, name in tensors:
        names.setdefault(part, []).append(name)
    return names


def _listed(names: Mapping[str, Sequence[str]]) -> list[TensorName]:
    return [TensorName(part, name) for part, listed in names.items() for name in listed]
