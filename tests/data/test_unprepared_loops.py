"""The loop around a call is found; what a gather in it refuses is in tests/drivetrain/accelerator/test_metrics.py."""

import weakref

from torch import nn
from torch.utils.data import DataLoader

from drivetrain_data import UnpreparedLoops


def test_a_function_keeps_nothing_that_it_lets_go_after_a_look() -> None:
    loader = DataLoader([1])
    for _ in loader:
        output = nn.Linear(1, 1)
        lives = weakref.ref(output)
        found = UnpreparedLoops().innermost()
        assert found is not None
        assert found.startswith("`loader` (")
        del output
        assert lives() is None
