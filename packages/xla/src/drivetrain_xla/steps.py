"""The ends of graphs: at an optimizer's step, a micro-batch of an open window, and between batches of an evaluation.

torch-xla records operations and computes nothing until a graph ends or a value is read. A graph that never ends grows
without bound; one that ends too often moves values between device memory and computations. Values that are read, in a
save too, need no end: a step has computed them, and what is not yet computed is as it is read.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.optim import Optimizer

from drivetrain_backends.composed.strategy import StepGuard
from drivetrain_backends.gradients.reducer import ParameterGradients
from drivetrain_backends.gradients.tracker import GradientGroup
from drivetrain_xla.compilations import CompilationCounter
from drivetrain_xla.library import Library


class Graphs:
    """Ends graphs, and counts what they compiled.

    Attributes:
        counter: The record of compilations.
    """

    def __init__(self, library: Library) -> None:
        self.counter = CompilationCounter(library.metrics)
        self._sync = library.torch_xla.sync
        self._is_evaluating = False  # whether the pending graph holds forwards without gradients alone

    def end(self, *, stepped: bool = False) -> None:
        """Hand the pending graph to the device, without waiting for it."""
        self.counter.before_sync()
        self._sync()
        self.counter.after_sync(stepped=stepped)
        self._is_evaluating = False

    def note_forward(self, shapes: Sequence[str]) -> None:
        """Record the inputs of a forward that begins; end the graph of the batch that was evaluated before it."""
        is_evaluated = not torch.is_grad_enabled()
        if is_evaluated and self._is_evaluating:
            self.end()
        self._is_evaluating = is_evaluated and not self.counter.has_inputs
        self.counter.note_inputs(shapes)


class EndGraphs(StepGuard):
    """End the graph of each step."""

    def __init__(self, graphs: Graphs) -> None:
        self._graphs = graphs

    def after_step(self, group: GradientGroup, optimizer: Optimizer) -> None:
        """End the graph behind the optimizer's operations."""
        del group, optimizer
        self._graphs.end(stepped=True)


class XLAGradients(ParameterGradients):
    """Gradients in `.grad`; the graph of each micro-batch ends with it, so that none grows with the window."""

    def __init__(self, graphs: Graphs) -> None:
        super().__init__(None)
        self._graphs = graphs

    @contextmanager
    def local(self, model: nn.Module) -> Generator[None]:
        """End the graph of a micro-batch that does not close its window."""
        del model
        yield
        self._graphs.end()
