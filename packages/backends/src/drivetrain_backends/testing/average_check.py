"""The check of a contract that averages of weights are those of a plain loop."""

from collections.abc import Callable

import torch
from torch import Tensor

from drivetrain_backends.testing.runner import Run
from drivetrain_backends.weight_average import WeightAverage

DECAY = 0.5


def check_average(
    run: Run, assert_close: Callable[[dict[str, Tensor], dict[str, Tensor], str], None]
) -> None:
    """Train a run, and compare its averages, applied to the model and loaded, with the weights after each step."""
    average, mean = WeightAverage(run.prepared, decay=DECAY), WeightAverage(run.prepared, decay=None)
    history = [run.weights(), *(run.weights() for _ in run.steps())]
    expected, before = history[0], history[-1]
    for weights in history[1:]:
        expected = {name: torch.lerp(expected[name], weights[name], 1 - DECAY) for name in weights}
    saved = average.state_dict()
    with average.applied():
        assert_close(expected, run.weights(), "average: the model inside applied()")
    after = run.weights()
    odd = [name for name, value in before.items() if not torch.equal(value, after[name])]
    assert not odd, f"average: {odd} have other bits after applied()"
    means = {name: torch.stack([one[name] for one in history[1:]]).mean(0) for name in before}
    with mean.applied():
        assert_close(means, run.weights(), "average: the mean of all updates")
    again = WeightAverage(run.prepared, decay=DECAY)
    again.load_state_dict(saved)
    with again.applied():
        assert_close(expected, run.weights(), "average: loaded")
