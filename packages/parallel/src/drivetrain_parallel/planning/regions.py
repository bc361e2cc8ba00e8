"""The division of one region: some column layers, the row layer that ends it, and the numbers that change.

Sizes propose divisions, such as three layouts of a fused query, key and value. A `Trial` decides between them where
the module around the region runs on one tensor.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from drivetrain_parallel.layers.divided_layers import LayerKind, kind_of
from drivetrain_parallel.plan import AttributeChange, Cut, LayerPlan, ParallelPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionShape:
    """The sizes of a region.

    Attributes:
        module: The module around it.
        columns: The names of its column layers in the module, in order.
        row: The name of its row layer.
        pieces: The number of equal pieces that a column layer's outputs consist of, by name, where that is known.
    """

    module: nn.Module
    columns: tuple[str, ...]
    row: str
    pieces: Mapping[str, int] = field(default_factory=dict[str, int])

    @property
    def outputs(self) -> list[int]:
        """The numbers of outputs of the column layers."""
        return [layer_sizes(self.module.get_submodule(name))[1] for name in self.columns]

    @property
    def width(self) -> int:
        """The number of inputs of the row layer."""
        return layer_sizes(self.module.get_submodule(self.row))[0]


def layer_sizes(layer: nn.Module) -> tuple[int, int]:
    """Return the numbers of inputs and outputs of a layer that maps features to features."""
    kind = kind_of(layer)
    assert kind is not None
    assert kind.inputs is not None
    shape = layer.weight.shape
    return shape[kind.inputs], shape[kind.outputs]  # type: ignore[index]


def proposals(shape: RegionShape, size: int) -> Iterator[ParallelPlan]:
    """Yield the divisions over `size` ranks that the sizes of a region allow, the most likely first.

    Attention is divided by heads, or by the heads of keys and values where these are fewer.
    """
    heads = numbers_of_heads(shape.module, shape.width)
    for num_units, pieces in _layouts(shape.outputs, shape.width, heads):
        said = [shape.pieces.get(name) for name in shape.columns]
        if num_units < size or any(n not in (None, len(one)) for n, one in zip(said, pieces, strict=True)):
            continue
        layers = (
            *(
                column_plan(shape.module.get_submodule(name), name, one, num_units, region=shape.row)
                for name, one in zip(shape.columns, pieces, strict=True)
            ),
            _row_plan(shape, num_units),
        )
        random = frozenset({shape.row}) if drops(shape.module) else frozenset[str]()
        for attributes in _changes(shape, num_units, heads):
            yield ParallelPlan(size=size, layers=layers, attributes=attributes, random=random)


def untried_proposal(shape: RegionShape, size: int) -> ParallelPlan | None:
    """Return the division of a region that cannot be tried: by the fewest heads, and in the pieces that are known.

    A layer whose number of pieces is unknown is one piece, so that each rank holds a contiguous part of it. No number
    in a module changes.
    """
    fewest = numbers_of_heads(shape.module, shape.width)[:1]
    known = replace(shape, pieces={name: shape.pieces.get(name, 1) for name in shape.columns})
    for one in proposals(known, size):
        num_units = {cut.num_units for layer in one.layers for cut in layer.cuts.values()}
        is_perceptron = num_units == {shape.width} and len(shape.columns) < 3
        if not one.attributes and (is_perceptron or num_units == set(fewest)):
            return one
    return None


def _layouts(
    outputs: Sequence[int], width: int, heads: Sequence[int]
) -> Iterator[tuple[int, list[tuple[int, ...]]]]:
    """Yield the number of units, and the pieces of each column layer."""
    alike = [(one,) for one in outputs]
    if len(outputs) < 3 and set(outputs) == {
        width
    }:  # a perceptron, with or without a gate; or attention of one head
        yield width, alike
    elif len(outputs) == 1 and outputs[0] == 2 * width:
        yield width, [(width, width)]
    if set(outputs) == {width} or (len(outputs) == 3 and outputs[0] == width and outputs[1] == outputs[2]):
        yield from ((number, alike) for number in heads if all(one % number == 0 for one in outputs))
    elif len(outputs) == 1:
        shared, odd = divmod(outputs[0] - width, 2)  # of the keys, and of the values
        for number in heads if not odd and 0 < shared <= width else ():
            if shared % number == 0:
                yield number, [(width, shared, shared)]
                yield number, [(outputs[0],)]  # by head: its query, key and value


def column_plan(
    layer: nn.Module, name: str, pieces: tuple[int, ...], num_units: int, *, region: str
) -> LayerPlan:
    """Return the plan of a column layer, whose bias is divided as its outputs."""
    kind = kind_of(layer)
    assert kind is not None
    return LayerPlan(
        name=name, style="column", region=region, cuts=output_cuts(layer, kind, pieces, num_units)
    )


def output_cuts(
    layer: nn.Module, kind: LayerKind, pieces: tuple[int, ...], num_units: int
) -> Mapping[str, Cut]:
    """Return the division of a layer's parameters along its outputs."""
    cuts = {"weight": Cut(dim=kind.outputs, pieces=pieces, num_units=num_units)}
    if getattr(layer, "bias", None) is not None:
        cuts["bias"] = Cut(dim=0, pieces=pieces, num_units=num_units)
    return cuts


def _row_plan(shape: RegionShape, num_units: int) -> LayerPlan:
    kind = kind_of(shape.module.get_submodule(shape.row))
    assert kind is not None
    assert kind.inputs is not None
    cuts = {"weight": Cut(dim=kind.inputs, pieces=(shape.width,), num_units=num_units)}
    return LayerPlan(name=shape.row, style="row", region=shape.row, cuts=cuts)


def numbers_of_heads(module: nn.Module, width: int) -> list[int]:
    """Return the numbers of heads that a module names, the smallest first: those of keys and values."""
    found = {
        value
        for one in module.modules()
        for holder in (one, getattr(one, "config", None))
        for key, value in getattr(holder, "__dict__", {}).items()
        if _counts_heads(key, value) and width % value == 0
    }
    return sorted(found)


def _counts_heads(name: str, value: object) -> bool:
    others = ("dim", "size", "group", "rep", "hidden", "layer")
    return type(value) is int and value > 0 and "head" in name and not any(other in name for other in others)


def _changes(
    shape: RegionShape, num_units: int, heads: Sequence[int]
) -> Iterator[tuple[AttributeChange, ...]]:
    """Yield the numbers in modules that may have to change, the fewest first."""
    yield ()
    counts: list[AttributeChange] = []
    widths: list[AttributeChange] = []
    for name, one in shape.module.named_modules() if num_units in heads else ():
        for key, value in vars(one).items() if kind_of(one) is None else ():
            if type(value) is not int or value % num_units:
                continue
            change = AttributeChange(
                module=name, attribute=key, whole=value, num_units=num_units, region=shape.row
            )
            if _counts_heads(key, value) and value in heads:
                counts.append(change)
            elif value == shape.width:
                widths.append(change)
    if counts:
        yield tuple(counts)
    if widths:
        yield tuple(widths)
    if counts and widths:
        yield (*counts, *widths)


def drops(module: nn.Module) -> bool:
    """Return whether a module drops elements at random when it trains."""
    return any(
        isinstance(value, float) and value > 0 and ("drop" in key or "drop" in type(one).__name__.lower())
        for one in module.modules()
        for holder in (one, getattr(one, "config", None))
        for key, value in getattr(holder, "__dict__", {}).items()
    )
