"""LocalSGD, beside the installed Accelerate's in a program of its own."""

import pytest

from accelerate_programs import run_program

pytest.importorskip("accelerate")


CASES = [
    pytest.param(1, 3, "on", marks=pytest.mark.slow),
    (2, 4, "on"),
    pytest.param(1, 2, "off", marks=pytest.mark.slow),
]


def flat(by_step: list[list[float]]) -> list[float]:
    return [weights for of_ranks in by_step for weights in of_ranks]


@pytest.mark.slow
def test_one_process_trains_as_without_it() -> None:
    found = run_program("with_local_sgd", "1", "3", "on", ours=True)
    expected = run_program("with_local_sgd", "1", "3", "on", ours=False)
    assert flat(found) == pytest.approx(flat(expected), rel=1e-6)


@pytest.mark.parametrize(("accumulation", "every", "enabled"), CASES)
@pytest.mark.slow
def test_two_processes_have_the_weights_of_the_real_one(accumulation: int, every: int, enabled: str) -> None:
    arguments = (str(accumulation), str(every), enabled)
    found = run_program("with_local_sgd", *arguments, ours=True, num_processes=2)
    expected = run_program("with_local_sgd", *arguments, ours=False, num_processes=2)
    # After the block, the real one goes on with momenta that differ: its replicas drift apart.
    in_block = None if enabled == "off" else -1
    assert flat(found[:in_block]) == pytest.approx(flat(expected[:in_block]), rel=1e-6)
    drifted = any(first != pytest.approx(second, rel=1e-9) for first, second in found[:-2])
    assert drifted == (enabled == "on")
    for first, second in found[-2:]:  # the end of the block, and a step together
        assert first == second
