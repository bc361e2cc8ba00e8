"""The record of compilations, over metrics whose numbers the test sets; test_training.py reads torch-xla's."""

import logging
from dataclasses import dataclass

import pytest

from drivetrain_xla.compilations import CompilationCounter


@dataclass
class Metrics:
    """What torch-xla's metrics say."""

    number: int | None = None
    seconds: float = 0.0

    def counter_value(self, name: str) -> int | None:
        assert name == "UncachedCompile"
        return self.number

    def metric_data(self, name: str) -> tuple[int, float] | None:
        assert name == "CompileTime"
        return None if self.number is None else (self.number, self.seconds * 1e9)

    def compile(self, number: int = 1) -> None:
        self.number = (self.number or 0) + number
        self.seconds += 2.0 * number


def test_each_compilation_is_told_with_its_cause(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)  # whatever a library has set in an earlier test
    metrics = Metrics()
    metrics.compile(5)  # before this run
    counter = CompilationCounter(metrics)

    def step(shape: str, *, reads: bool = False, compiles: int = 0) -> None:
        counter.note_inputs([shape])
        if reads:
            metrics.compile()
        counter.before_sync()
        metrics.compile(compiles)
        counter.after_sync(stepped=True)

    step("x: (8, 3) float32", compiles=1)
    step("x: (8, 3) float32", compiles=2)
    metrics.compile()
    step("x: (8, 3) float32")
    step("x: (8, 3) float32", reads=True)
    step("x: (5, 3) float32", compiles=1)
    step("x: (8, 3) float32")
    assert [(one.step, one.num_graphs, one.cause) for one in counter.found] == [
        (1, 1, "shape"),
        (2, 2, "graph"),
        (2, 1, "between"),
        (4, 1, "read"),
        (5, 1, "shape"),
    ]
    assert caplog.messages == [
        "step 4 compiled a graph in 2.0 s, for a value that was read inside a step (x: (8, 3) float32); read losses "
        "after optimizer.step()",
        "step 5 compiled a graph in 2.0 s, for a new shape, x: (5, 3) float32: XLA compiles a graph for each; "
        "PadTail keeps that of an epoch's tail",
    ]
    assert str(counter.found[1]) == (
        "step 2 compiled 2 graphs in 4.0 s, for other operations on known shapes (x: (8, 3) float32)"
    )


def test_a_run_that_compiled_nothing_has_no_record() -> None:
    counter = CompilationCounter(Metrics())
    counter.note_inputs(["x: (1,) float32"])
    counter.before_sync()
    counter.after_sync(stepped=True)
    assert counter.found == []
