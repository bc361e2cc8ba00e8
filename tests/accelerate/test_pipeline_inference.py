"""Inference through stages, in programs of two ranks."""

import pytest

from accelerate_programs import run_program

pytest.importorskip("transformers")
CASES = [("gathered", "4,3,1"), pytest.param("last", "5", marks=pytest.mark.slow)]


@pytest.mark.parametrize(("gathers", "samples"), CASES)
def test_a_model_in_stages_returns_what_the_whole_one_does(gathers: str, samples: str) -> None:
    expected, num_parameters, every = run_program("with_pippy", gathers, samples, ours=True, num_processes=2)
    (first, own), (last, others) = every
    for found in [last, first] if gathers == "gathered" else [last]:
        for one, whole in zip(found, expected, strict=True):
            assert [pytest.approx(row, abs=1e-4) for row in one] == whole
    if gathers == "last":
        assert first == [None]
    assert max(own, others) < num_parameters <= own + others


def test_one_process_holds_the_whole_model() -> None:
    expected, _, ((found, _),) = run_program("with_pippy", "last", "3", ours=True)
    assert [pytest.approx(row, abs=1e-4) for row in found[0]] == expected[0]
