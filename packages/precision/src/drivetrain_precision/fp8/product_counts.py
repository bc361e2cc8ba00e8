"""Count the matrix products of a step by format, from torch's own record of operations."""

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass

from drivetrain_precision.compat import OperationEvent, num_compiled_graphs, record_operations

# The operations that multiply matrices. A product in 8 bits or fewer takes scales with its operands.
_SCALED = ("aten::_scaled_mm", "aten::_scaled_grouped_mm")  # not attention, aten::_scaled_dot_product_...
# What autograd calls a graph of torch.compile, and its gradient.
_COMPILED = frozenset({"CompiledFunction", "CompiledFunctionBackward"})
_PLAIN = frozenset({"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_grouped_mm"})
_OTHER_PROFILER = "another profiler recorded, of which torch allows one at a time; let it leave out a step"
_COMPILING = "torch.compile was compiling; mark the sizes that change from step to step as dynamic"


@dataclass(slots=True, kw_only=True)
class ProductCounts:
    """The counts of the matrix products that ran, filled in when the counting ends."""

    scaled: int = 0  # in 8 bits or fewer
    others: int = 0  # in other formats: of layers that are not converted, attention, emulation
    compiled: int = 0  # calls of graphs that torch.compile has made, and of their gradients
    # Not while another profiler records, nor where something is compiled: tracing runs operations without data.
    is_counted: bool = False
    hindrance: str | None = None  # the reason in words, once the counting has ended without counts


@contextmanager
def counting_products() -> Generator[ProductCounts]:
    """Count the matrix products of the block and of backwards in it, compiled code included."""
    counts, num_graphs = ProductCounts(), num_compiled_graphs()
    with record_operations() as events:
        yield counts
    if events is None:
        counts.hindrance = _OTHER_PROFILER
    elif num_compiled_graphs() != num_graphs:
        counts.hindrance = _COMPILING
    else:
        add_products(counts, events)


def add_products(counts: ProductCounts, events: Iterable[OperationEvent]) -> None:
    """Add the products among recorded operations."""
    counts.is_counted = True
    # A tensor class dispatches its product to another operation, and a device without the units computes a scaled
    # product by a plain one: only the innermost counts, except below a scaled one.
    for event in events:
        if event.name in _COMPILED:
            counts.compiled += 1
        elif event.name.startswith(_SCALED):
            counts.scaled += 1
        elif event.name in _PLAIN and not event.calls(_PLAIN, _SCALED) and not event.is_called_by(_SCALED):
            counts.others += 1
