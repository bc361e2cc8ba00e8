"""A count of compilations, each with what caused it: XLA compiles every graph, and a new shape is a new graph."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

logger = logging.getLogger(__name__)

# Every run compiles its first step, and its second, before which the optimizer had no states.
_EXPECTED_STEPS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Compilation:
    """The graphs compiled at one moment, mostly a single one.

    Attributes:
        step: The optimizer step, from 1, on the way to which they were compiled, or behind it for "between".
        num_graphs: The number of graphs.
        seconds: The time that compiling took.
        cause: "shape" if a model was given a shape for the first time; "read" if a value was read inside a step,
            which computes the graph so far on its own; "between" if other tensors were computed and read between
            steps; "graph" if the operations changed, as when an optimizer makes its states.
        shapes: The inputs of the models since the graph before, such as `x: (8, 3) float32`.
    """

    step: int
    num_graphs: int
    seconds: float
    cause: Literal["shape", "read", "between", "graph"]
    shapes: tuple[str, ...]

    def __str__(self) -> str:
        given = "; ".join(self.shapes) or "no model called"
        why = {
            "shape": f"for a new shape, {given}: XLA compiles a graph for each; PadTail keeps that of an epoch's "
            "tail",
            "read": f"for a value that was read inside a step ({given}); read losses after optimizer.step()",
            "between": "for what was computed and read behind it",
            "graph": f"for other operations on known shapes ({given})",
        }
        graphs = "a graph" if self.num_graphs == 1 else f"{self.num_graphs} graphs"
        return f"step {self.step} compiled {graphs} in {self.seconds:.1f} s, {why[self.cause]}"


class CompilationCounter:
    """A record of the compilations of a run, asked where graphs begin and end.

    Args:
        metrics: The module `torch_xla.debug.metrics`.

    Attributes:
        found: The compilations so far.
    """

    def __init__(self, metrics: Any) -> None:
        self.found: list[Compilation] = []
        self._metrics = metrics
        self._known = set[tuple[str, ...]]()  # the inputs of graphs so far
        self._given: list[str] = []  # since the graph before
        self._step = 1
        self._num_graphs, self._seconds = self._num_compiled(), self._compile_seconds()

    @property
    def has_inputs(self) -> bool:
        """True if a model was called since the graph began."""
        return bool(self._given)

    def note_inputs(self, shapes: Sequence[str]) -> None:
        """Record the shapes that a model is called with, before its forward."""
        if not self._given:
            self._record("between")
        self._given.extend(shapes)

    def before_sync(self) -> None:
        """Record what was compiled since the graph began: values were read."""
        self._record("read")

    def after_sync(self, *, stepped: bool) -> None:
        """Record what the graph that has ended compiled."""
        self._record("graph")
        self._known.add(tuple(self._given))
        self._given.clear()
        self._step += stepped

    def _record(self, cause: Literal["read", "between", "graph"]) -> None:
        if (number := self._num_compiled()) == self._num_graphs:
            return
        seconds, given = self._compile_seconds(), tuple(self._given)
        one = Compilation(
            step=self._step - (cause == "between"),
            num_graphs=number - self._num_graphs,
            seconds=seconds - self._seconds,
            cause="shape" if given and given not in self._known else cause,
            shapes=given,
        )
        self._num_graphs, self._seconds = number, seconds
        self.found.append(one)
        is_expected = one.cause in ("graph", "between") or one.step <= _EXPECTED_STEPS
        logger.log(logging.INFO if is_expected else logging.WARNING, "%s", one)

    def _num_compiled(self) -> int:
        return int(self._metrics.counter_value("UncachedCompile") or 0)

    def _compile_seconds(self) -> float:
        data = self._metrics.metric_data("CompileTime")
        return 0.0 if data is None else data[1] / 1e9
