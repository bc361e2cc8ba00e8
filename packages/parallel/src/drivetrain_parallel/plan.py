"""The plan of a divided model, as frozen values: which layers are divided, how, and what each rank holds of them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

Style = Literal["column", "row", "vocabulary", "gathered_column", "vocabulary_column", "summed", "experts"]
# Those of a tensor axis, which patterns may give.
STYLES: tuple[Style, ...] = tuple(style for style in get_args(Style) if style != "experts")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """The division of one dimension of a tensor among ranks.

    The dimension consists of `pieces`, such as query, key and value of a fused projection, and each piece of
    `num_units` equal units, such as heads. Each rank holds the same run of units of every piece: unit numbers
    `num_units * rank // size` up to `num_units * (rank + 1) // size`.

    Attributes:
        dim: The dimension that is divided.
        pieces: The numbers of elements of the pieces, in order.
        num_units: The number of units of each piece; a unit is never divided.
    """

    dim: int
    pieces: tuple[int, ...]
    num_units: int

    def __post_init__(self) -> None:
        if any(piece % self.num_units for piece in self.pieces):
            raise ValueError(
                f"pieces of {self.pieces} elements do not consist of {self.num_units} equal units"
            )

    @property
    def num_elements(self) -> int:
        """The number of elements of the whole dimension."""
        return sum(self.pieces)

    def units(self, rank: int, size: int) -> tuple[int, int]:
        """Return the first unit of `rank` among `size` ranks, and the unit after its last.

        Example:
            >>> Cut(dim=0, pieces=(65,), num_units=65).units(1, 2)
            (32, 65)
        """
        return self.num_units * rank // size, self.num_units * (rank + 1) // size

    def ranges(self, rank: int, size: int) -> tuple[tuple[int, int], ...]:
        """Return the (start, stop) of what `rank` holds of each piece, counted in the whole dimension.

        Example:
            >>> Cut(dim=0, pieces=(8, 4, 4), num_units=4).ranges(1, 2)
            ((4, 8), (10, 12), (14, 16))
        """
        first, last = self.units(rank, size)
        found: list[tuple[int, int]] = []
        offset = 0
        for piece in self.pieces:
            unit = piece // self.num_units
            found.append((offset + first * unit, offset + last * unit))
            offset += piece
        return tuple(found)

    def sizes(self, size: int) -> tuple[int, ...]:
        """Return the numbers of elements that each of `size` ranks holds."""
        held = (self.ranges(rank, size) for rank in range(size))
        return tuple(sum(stop - start for start, stop in one) for one in held)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPlan:
    """A divided layer.

    - `column`: each rank computes some of the outputs, from the whole input.
    - `row`: each rank computes a part of every output from some of the inputs; the parts are added up.
    - `gathered_column`: as `column`, and the outputs of all ranks are joined.
    - `vocabulary_column`: as `gathered_column`; in training the outputs are joined only if something else than a
      cross entropy asks for them.
    - `vocabulary`: each rank holds some rows of an embedding; what ranks look up is added up.
    - `summed`: every rank holds the whole layer and applies it to its own part of the activations, as a norm of
      each head; the gradients of its parameters are added up.
    - `experts`: each rank holds some experts, which compute the tokens of all ranks. Ranks have tokens and losses of
      their own, and the gradients of the experts' parameters are the means of all ranks' losses.

    Attributes:
        name: The name of the module.
        style: The way it is divided, of the above.
        region: The name of the row layer that ends the region which a column layer begins; a row layer's own name;
            that of the region which a summed layer was found in; else empty. Between column and row, each rank has
            its own part of the activations.
        cuts: The division of each parameter that is divided, by its name in the module.
    """

    name: str
    style: Style
    region: str = ""
    cuts: Mapping[str, Cut] = field(default_factory=dict[str, Cut])


@dataclass(frozen=True, slots=True, kw_only=True)
class AttributeChange:
    """A number in a module, such as its number of heads, which becomes the number of this rank.

    Attributes:
        module: The name of the module.
        attribute: The name of the attribute.
        whole: The number in the undivided module.
        num_units: The number of units that it consists of, as of the layers' `Cut`.
        region: The region whose layers it changes with.
    """

    module: str
    attribute: str
    whole: int
    num_units: int
    region: str

    def of_rank(self, rank: int, size: int) -> int:
        """Return the number of `rank` among `size` ranks."""
        return Cut(dim=0, pieces=(self.whole,), num_units=self.num_units).sizes(size)[rank]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelPlan:
    """The division of a model among the ranks of a tensor axis, or of its experts among those that hold them.

    Attributes:
        size: The number of ranks.
        layers: The divided layers, in the order of the model's modules.
        attributes: The numbers in modules that change with them.
        sources: The source of each divided layer's style, by name: "given", "the model's own plan" or "found".
        left: The layers with parameters that every rank holds in full although their kind could be divided, with
            the reason.
        random: The regions whose layers draw random numbers, such as the dropout of attention.
    """

    size: int
    layers: tuple[LayerPlan, ...] = ()
    attributes: tuple[AttributeChange, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict[str, str])
    left: Mapping[str, str] = field(default_factory=dict[str, str])
    random: frozenset[str] = frozenset()

    def regions(self) -> Iterator["ParallelPlan"]:
        """Yield the plan of each region, for a model that is divided step by step; layers outside of one are one."""
        for region in dict.fromkeys(layer.region for layer in self.layers):
            yield replace(
                self,
                layers=tuple(layer for layer in self.layers if layer.region == region),
                attributes=tuple(change for change in self.attributes if change.region == region),
            )


def shared_prefix(names: Sequence[str]) -> str:
    """Return the name of the innermost module that holds all of these, with a dot; empty for the model itself."""
    parts = [name.split(".")[:-1] for name in names]
    shared: list[str] = []
    for level in zip(*parts, strict=False):
        if len(set(level)) > 1:
            break
        shared.append(level[0])
    return "".join(f"{part}." for part in shared)
