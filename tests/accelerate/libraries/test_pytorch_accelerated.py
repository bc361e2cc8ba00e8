"""The Trainer of pytorch-accelerated, unchanged, on drivetrain and on the real Accelerate."""

import pytest

from accelerate_programs import run_program
from optional_modules import skip_without

skip_without("accelerate")  # the interface is held against the real one
skip_without("pytorch_accelerated")  # its Trainer is what runs


@pytest.mark.slow
@pytest.mark.parametrize("num_processes", [1, 2])
def test_it_trains_and_evaluates_as_with_the_real_one(
    num_processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")  # without it the real one's processes train alone
    ours, theirs = (
        run_program("with_pytorch_accelerated", ours=ours, num_processes=num_processes)
        for ours in (True, False)
    )
    for name, values in theirs.items():
        assert ours[name] == pytest.approx(values, rel=1e-5)
        assert len(values) == 3
