"""Loops as Accelerate's guides write them for each parallel dimension, on several processes beside a plain one."""

import pytest

from accelerate_programs import run_program
from optional_modules import skip_without

skip_without("transformers")

PROGRAM = "with_parallel_dimensions"
AXES = {"tensor": "tp", "plugin": "tp", "context": "cp", "sequence": "sp"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", AXES)
def test_a_loop_of_the_guides_trains_as_one_process(kind: str) -> None:
    whole = run_program(PROGRAM, "plain", "2", ours=True)
    found = run_program(PROGRAM, kind, "2", ours=True, num_processes=2)
    assert found["losses"] == pytest.approx(whole["losses"], abs=2e-6)
    assert (found["axes"], found["is_divided"]) == ([AXES[kind]], AXES[kind] == "tp")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "batch_size", "axes"),
    [("sequence, engine", 2, ["sp"]), ("sequence, engine, groups", 1, ["dp_shard", "sp"])],
)
def test_a_loop_over_parts_of_sequences_trains_as_one_process_under_deepspeed(
    deepspeed_operators: None, kind: str, batch_size: int, axes: list[str]
) -> None:
    skip_without("deepspeed")
    whole = run_program(PROGRAM, "plain", "2", ours=True)
    found = run_program(PROGRAM, kind, str(batch_size), ours=True, num_processes=2 * len(axes))
    assert found["losses"] == pytest.approx(whole["losses"], abs=2e-6)
    assert found["axes"] == axes
